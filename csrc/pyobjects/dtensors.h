// PyTorch's DTensors: their parts as values, and DTensors made of parts.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/placement.h"
#include "layout/tensor_meta.h"

namespace funcol::python {

PyTypeObject* dtensor_type();

// Calls DTensor.__new__(DTensor, local, spec, requires_grad=...), without the __init__ that does nothing.
py::object make_dtensor(PyObject* local, py::handle spec, bool requires_grad = false);

// Returns a field of an exact DTensor, borrowed; null if it has none yet.
PyObject* spec_of(PyObject* dtensor);
PyObject* local_of(PyObject* dtensor);
void set_spec(PyObject* dtensor, py::object spec);

// Returns the Python object of an exact DTensor, which the tensor keeps; null for other tensors.
PyObject* dtensor_object(const at::Tensor& tensor);
// Returns the local tensor of an exact DTensor, which holds it.
const at::Tensor& local_of(const at::Tensor& dtensor);

// The shape and strides of a full tensor, in one block of memory.
class Geometry {
 public:
  Geometry(at::IntArrayRef sizes, at::IntArrayRef strides) : numbers_(sizes.begin(), sizes.end()) {
    numbers_.append(strides.begin(), strides.end());
  }

  at::IntArrayRef sizes() const { return {numbers_.data(), numbers_.size() / 2}; }
  at::IntArrayRef strides() const { return {numbers_.data() + numbers_.size() / 2, numbers_.size() / 2}; }

 private:
  c10::SmallVector<int64_t, 6> numbers_;
};

// Makes the same DTensor for a spec of this geometry, in a third of the time if this PyTorch release can.
at::Tensor make_dtensor(at::Tensor local, py::handle spec, const Geometry& geometry,
                        bool requires_grad = false);

// Returns true if an ExplicitRedistributionContext of PyTorch is active on this thread.
bool observes_redistribution();

// Returns the values of a list or tuple of `num_axes` placements of a tensor with `num_dims` dims, with dims
// counted from 0. Returns nullopt for other lengths, unknown kinds, masks and mixed partials, and for other
// objects.
std::optional<std::vector<Placement>> known_placements(py::handle sequence, size_t num_axes,
                                                       int64_t num_dims);

// Returns a new DTensorSpec of a tensor with `placements`, which have no masks. Axes cut in the order of the
// mesh, or, if shards are strided, in the order that these stand for.
py::object new_spec(py::handle device_mesh, const std::vector<Placement>& placements, TensorMeta meta);

}  // namespace funcol::python
