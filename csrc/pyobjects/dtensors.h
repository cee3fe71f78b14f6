// PyTorch's DTensors, taken apart and put together.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/placement.h"
#include "layout/tensor_meta.h"

namespace funcol::python {

PyTypeObject* dtensor_type();

// DTensor.__new__(DTensor, local, spec, requires_grad=...), without the __init__ that does nothing.
py::object make_dtensor(PyObject* local, py::handle spec, bool requires_grad = false);

// Whether an ExplicitRedistributionContext of PyTorch is active on this thread.
bool observes_redistribution();

// False if one of the tuple's numbers is a symbol.
bool read_ints(py::handle tuple, std::vector<int64_t>& numbers);

// A list or tuple of placements for `num_axes` axes, of a tensor of `num_dims` dims; dims that it has are
// counted from 0. Nothing for what PyTorch has to see to: another number, unknown kinds, masks, mixed
// partials.
std::optional<std::vector<Placement>> known_placements(py::handle sequence, size_t num_axes,
                                                       int64_t num_dims);

// A DTensorSpec of a tensor held by `placements`, which have no masks, axes cutting in the order of the mesh
// or, where shards are strided, in the order that these stand for. It is the caller's own.
py::object interned_spec(py::handle device_mesh, const std::vector<Placement>& placements, TensorMeta meta);

}  // namespace funcol::python
