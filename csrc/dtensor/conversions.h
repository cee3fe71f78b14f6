// DTensor's differentiable conversions: from_local, to_local, full_tensor.
//
// Values, placements and gradients are PyTorch's, and so is what the caller sees of aliasing: to_local() is a
// view that cannot be written to where a gradient is recorded. Each is differentiable any number of times, as
// its gradient is made of the others.
//
// All need the GIL, and give a null object for DTensors and arguments that C++ does not serve (see
// plain_dtensors.h): nothing has happened then, and PyTorch's way is to be taken.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// `grad_placements`: a tuple of placements, or None for those of the tensor.
py::object to_local(py::handle dtensor, py::handle grad_placements);

// `placements`: a tuple or list, or None for Replicate alone. `shape` and `stride`: of the whole, or None for
// both.
py::object from_local(py::handle local, py::handle device_mesh, py::handle placements, py::handle shape,
                      py::handle stride, py::handle grad_placements);

py::object full_tensor(py::handle dtensor, py::handle grad_placements);

}  // namespace funcol::python
