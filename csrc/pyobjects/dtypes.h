// Dtypes as Python's objects and as values.
#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// The value of a torch.dtype.
inline at::ScalarType to_dtype(py::handle dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

inline py::object to_python(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

}  // namespace funcol::python
