// DTensors that C++ serves: an exact DTensor over a plain local tensor, which no mode, transform or tracer of
// PyTorch watches, on a mesh that holds this rank, with sizes that are numbers and placements that are
// neither strided, masked nor of unknown kinds.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "dtensor/meshes.h"
#include "pyobjects/spec_objects.h"

namespace funcol::python {

bool is_dtensor(py::handle object);

// A torch.Tensor or Parameter of no subclass, which belongs to no mode or transform.
bool is_plain(py::handle tensor);

// Neither a mode nor a transform nor forward differentiation has a say in what is called with `tensor`.
bool is_unwatched(py::handle tensor);

// `sequence`, a tuple or list, as values for a tensor of `num_dims` dims on `num_axes` axes, dims counted
// from 0; nothing if C++ does not serve one of them, or their number is another.
std::optional<std::vector<Placement>> plain_placements(py::handle sequence, size_t num_axes,
                                                       int64_t num_dims);

// The local tensor of a DTensor; undefined if C++ does not serve the DTensor.
class PlainDTensor {
 public:
  explicit PlainDTensor(py::handle dtensor);
  bool is_served() const { return static_cast<bool>(local_); }
  const py::object& local() const { return local_; }
  const at::Tensor& tensor() const { return THPVariable_Unpack(local_.ptr()); }

 private:
  py::object local_;
};

// A DTensorSpec, as values.
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

// Nothing if C++ does not serve DTensors of this spec.
std::optional<PlainSpec> plain_spec(py::handle spec);

py::object replicate();

// `placements`, of `num_axes` axes, with Replicate on the axes for which `is_whole(axis)`.
template <typename IsWhole>
py::object with_replicate(const py::object& placements, size_t num_axes, const IsWhole& is_whole) {
  py::object changed;
  for (size_t axis = 0; axis < num_axes; ++axis) {
    if (is_whole(axis)) {
      if (!changed) {
        changed = py::list(placements);
      }
      py::reinterpret_borrow<py::list>(changed)[axis] = replicate();
    }
  }
  return changed ? py::object(py::tuple(changed)) : placements;
}

}  // namespace funcol::python
