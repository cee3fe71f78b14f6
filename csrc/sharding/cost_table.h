// Costs of redistributions between specs, for PyTorch's strategies.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "planner/cost_model.h"

namespace funcol::python {

// Returns the cost of a redistribution from each source to each target, in the model's unit. Raises
// ValueError unless the specs are of one tensor on one mesh. `model`: none for the mesh's default model.
// Needs the GIL.
std::vector<std::vector<double>> redistribute_cost_table(const py::sequence& sources,
                                                         const py::sequence& targets,
                                                         const std::optional<CostModel>& model);

}  // namespace funcol::python
