// PyTorch's sharding rules read from Python, and what they choose for a call.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <variant>

#include "propagation/upstream_search.h"
#include "pyobjects/op_schemas.h"
#include "sharding/mask_partials.h"

namespace funcol::python {

// Why PyTorch's propagator has to decide, such as "rule".
using Reason = std::string;

// The composition that PyTorch chooses for a part of a call whose outputs are known. `rule` is an AxisRule or
// a WholeRule of funcol.installation.pytorch_rules. Keyword tensors keep their layouts. Masks of its rows are
// added to `masks`. Throws what PyTorch's filter raises.
std::variant<OutputSharding, Reason> pytorchs_choice(py::handle op_schema, const PythonSchema& schema,
                                                     const Part& part, py::handle rule, MaskObjects& masks);

}  // namespace funcol::python
