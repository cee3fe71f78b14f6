// DTensors that C++ supports.
//
// Such a DTensor is of no subclass and has a plain local tensor. No mode, transform or tracer of PyTorch
// observes it, this rank is in its mesh, its sizes are numbers, and its placements are neither strided,
// masked nor of unknown kinds.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "pyobjects/meshes.h"
#include "pyobjects/specs.h"

namespace funcol::python {

bool is_dtensor(py::handle object);

// Returns true if no mode or transform is active, and `tensor` takes no part in forward differentiation.
bool is_unobserved(py::handle tensor);

// Returns the values of a tuple or list of `num_axes` placements of a tensor with `num_dims` dims, with dims
// counted from 0. Returns nullopt for other lengths, and if C++ does not support one of the placements.
std::optional<std::vector<Placement>> plain_placements(py::handle sequence, size_t num_axes,
                                                       int64_t num_dims);

// Returns the local tensor of a DTensor; an undefined tensor if C++ does not support the DTensor.
at::Tensor plain_local(py::handle dtensor);

// The values of a DTensorSpec.
struct PlainSpec {
  SpecObjects objects;
  KnownMesh* known;
  std::vector<Placement> placements;
  ShardOrder order;
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;
  at::ScalarType dtype;

  int64_t num_dims() const { return static_cast<int64_t>(shape.size()); }
};

// Returns the values of `spec`. Returns nullopt if C++ does not support DTensors of this spec.
std::optional<PlainSpec> plain_spec(py::handle spec);

// Returns `placements`, of `num_axes` axes, with Replicate on the axes for which `is_replicated(axis)` holds.
template <typename IsReplicated>
py::object with_replicate(const py::object& placements, size_t num_axes, const IsReplicated& is_replicated) {
  py::object changed;
  for (size_t axis = 0; axis < num_axes; ++axis) {
    if (is_replicated(axis)) {
      if (!changed) {
        changed = py::list(placements);
      }
      py::reinterpret_borrow<py::list>(changed)[axis] = replicate();
    }
  }
  return changed ? py::object(py::tuple(changed)) : placements;
}

}  // namespace funcol::python
