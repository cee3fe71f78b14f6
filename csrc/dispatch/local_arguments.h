// Arguments that are sizes of full tensors, such as the shape of a view, and the sizes of this rank's parts.
//
// PyTorch counterpart: ShardingPropagator._adjust_shape_and_stride_args.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "pyobjects/op_schemas.h"
#include "sharding/sharding_engine.h"

namespace funcol::python {

// Returns the arguments of a decided call on `mesh` to replace, by their place. Returns nullopt if another
// operator has to run, as for squeeze() where this rank's part has size 1 in a dim in which the full tensor
// has not. Needs the GIL.
std::optional<std::vector<std::pair<size_t, c10::IValue>>> local_arguments(py::handle op_overload,
                                                                           const PythonSchema& schema,
                                                                           const CallDecision& decision,
                                                                           py::handle mesh);

}  // namespace funcol::python
