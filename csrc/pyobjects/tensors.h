// Tensors and dtypes as Python objects, which need the GIL to be made, and dtypes as values.
#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

namespace funcol::python {

inline py::object to_python(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

inline py::list to_python(std::vector<at::Tensor> tensors) {
  py::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(tensors[i])));
  }
  return list;
}

// Returns the value of a torch.dtype.
inline at::ScalarType to_dtype(py::handle dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

// Returns the value of a torch.dtype or None. Raises TypeError naming `op`, the caller, for other objects.
inline std::optional<at::ScalarType> to_optional_dtype(py::handle dtype, const char* op) {
  if (dtype.is_none()) {
    return std::nullopt;
  }
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "funcol::", op, ": a dtype is a ",
                   Py_TYPE(dtype.ptr())->tp_name, ". Pass a torch.dtype.");
  return to_dtype(dtype);
}

inline py::object to_python(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

}  // namespace funcol::python
