// PyTorch's DTensorSpecs made from values, each once.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>

#include "propagation/propagator.h"

namespace funcol::python {

// The Python placement that has a mask, told by Placement::mask.
using MaskedPlacements = std::function<py::object(const Placement&)>;

// The DTensorSpec of a tensor on `mesh`, made by `make(mesh, placements, shard_order, shape, stride, dtype,
// strided_as_order)`, the last None where no shard is strided, or made before: equal values give the same
// object, as long as it is among the last 4096 that were asked for. Placements with a mask are asked of
// `masked`, and their specs made each time.
py::object to_python_spec(const Spec& spec, py::handle mesh, bool strided_as_order, py::handle make,
                          const MaskedPlacements& masked);

// A spec that equals this one: that which to_python_spec() gives for its values, or will give from now on.
// Those with masks stay as they are. Errors as those of read_spec().
py::object same_spec(const py::object& spec);

void forget_specs();

// Empties what propagation engines remember.
void forget_decisions();

}  // namespace funcol::python
