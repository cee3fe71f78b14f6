// DTensor's differentiable conversions: from_local, to_local, full_tensor.
//
// Values, placements, gradients and aliasing are PyTorch's: where a gradient is recorded, to_local() returns
// a view that cannot be written to. Each conversion is differentiable any number of times, since its gradient
// consists of the others.
//
// All functions need the GIL. They return null, with nothing done, for DTensors and arguments that C++ does
// not support (see supported_dtensor.h).
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// Returns the local tensor. `grad_placements`: a tuple of placements, or None for the tensor's placements.
py::object to_local(py::handle dtensor, py::handle grad_placements);

// Returns a DTensor. `placements`: a tuple or list, or None to replicate. `shape` and `stride`: of the full
// tensor, or None for both.
py::object from_local(py::handle local, py::handle device_mesh, py::handle placements, py::handle shape,
                      py::handle stride, py::handle grad_placements);

py::object full_tensor(py::handle dtensor, py::handle grad_placements);

}  // namespace funcol::python
