// PyTorch's choice for a call, by its own rule.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <variant>

#include "propagation/propagator.h"
#include "pyobjects/op_schemas.h"
#include "sharding/upstream_rules.h"

namespace funcol::python {

// The composition that PyTorch chooses for a part of a call whose outputs are known; the reason if PyTorch
// has to decide. `rule` is a rule, and no reason. Keyword tensors keep their layouts. Throws what PyTorch's
// filter raises.
std::variant<OutputSharding, Reason> pytorchs_choice(const PythonSchema& schema, const Part& part,
                                                     const UpstreamRule& rule);

}  // namespace funcol::python
