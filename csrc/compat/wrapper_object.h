// The Python object of a wrapper subclass.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

namespace funcol::compat {

namespace detail {
template <typename Tensor>
PyObject* wrapper_object(const Tensor& tensor, PyTypeObject* type) {
  if constexpr (requires { THPVariable_Wrap(tensor, type); }) {
    tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
    return THPVariable_Wrap(tensor, type);
  } else {
    Py_RETURN_NONE;
  }
}
}  // namespace detail

// Returns a new object of `type`, which has __torch_dispatch__, for a tensor without a Python object; None if
// this PyTorch release lets only Python make one; null with an error set on failure. Needs the GIL.
inline PyObject* wrapper_object(const at::Tensor& tensor, PyTypeObject* type) {
  return detail::wrapper_object(tensor, type);
}

}  // namespace funcol::compat
