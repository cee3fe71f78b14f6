// Costs of redistributions between specs, for PyTorch's strategies.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "planner/cost_model.h"

namespace funcol::python {

// For each source the cost of getting to each target, in the model's unit: specs of one tensor on one mesh,
// else ValueError. `model`: none for the default one of the mesh. Needs the GIL.
std::vector<std::vector<double>> redistribute_cost_table(const py::sequence& sources,
                                                         const py::sequence& targets,
                                                         const std::optional<CostModel>& model);

}  // namespace funcol::python
