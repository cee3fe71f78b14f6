// Methods of torch.Tensor that would read a pending tensor without waking it, since they call no operator:
//  - new() and new_tensor() take the backend from the highest dispatch key;
//  - `x.data = pending` copies the storage pointer.
// Their C functions are replaced inside CPython's descriptors, so that the methods stay the same objects:
// each settles first, then calls the original. A CommTensor always has the wake key, which is removed
// meanwhile.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "async/async_tensor.h"
#include "bindings/bindings.h"

namespace funcol::python {
namespace {

using KeywordFunction = PyObject* (*)(PyObject*, PyObject*, PyObject*);

KeywordFunction original_new = nullptr;
KeywordFunction original_new_tensor = nullptr;
setter original_set_data = nullptr;

void settle_if_tensor(PyObject* object) {
  if (object != nullptr && THPVariable_Check(object)) {
    settle(THPVariable_Unpack(object));
  }
}

void correct_key_if_tensor(PyObject* object) {
  if (THPVariable_Check(object)) {
    correct_wake_key(*THPVariable_Unpack(object).unsafeGetTensorImpl());
  }
}

template <KeywordFunction* original>
PyObject* settled_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  settle_if_tensor(self);
  if (THPVariable_Check(self)) {
    remove_wake_key(*THPVariable_Unpack(self).unsafeGetTensorImpl());
  }
  PyObject* made = (*original)(self, args, kwargs);
  correct_key_if_tensor(self);
  return made;
  END_HANDLE_TH_ERRORS
}

int settled_set_data(PyObject* self, PyObject* data, void* closure) {
  HANDLE_TH_ERRORS
  settle_if_tensor(data);
  settle_if_tensor(self);
  const int failed = original_set_data(self, data, closure);
  correct_key_if_tensor(self);
  return failed;
  END_HANDLE_TH_ERRORS_RET(-1)
}

py::object descriptor(const char* name) {
  const auto base = py::module::import("torch._C").attr("TensorBase");
  return base.attr("__dict__")[name];
}

template <KeywordFunction* original>
void wrap_method(const char* name) {
  const auto object = descriptor(name);
  TORCH_CHECK(Py_IS_TYPE(object.ptr(), &PyMethodDescr_Type), "funcol: torch.Tensor.", name,
              " is no method descriptor in this PyTorch.");
  auto* method = reinterpret_cast<PyMethodDescrObject*>(object.ptr())->d_method;  // NOLINT
  TORCH_CHECK((method->ml_flags & METH_KEYWORDS) != 0, "funcol: torch.Tensor.", name,
              " takes no keywords in this PyTorch.");
  *original = reinterpret_cast<KeywordFunction>(reinterpret_cast<void (*)()>(method->ml_meth));  // NOLINT
  method->ml_meth =
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(settled_call<original>));  // NOLINT
}

}  // namespace

void bind_raw_access(py::module /*m*/) {
  wrap_method<&original_new>("new");
  wrap_method<&original_new_tensor>("new_tensor");
  const auto data = descriptor("data");
  TORCH_CHECK(Py_IS_TYPE(data.ptr(), &PyGetSetDescr_Type),
              "funcol: torch.Tensor.data is no property in this PyTorch.");
  auto* property = reinterpret_cast<PyGetSetDescrObject*>(data.ptr())->d_getset;  // NOLINT
  original_set_data = property->set;
  property->set = settled_set_data;
}

}  // namespace funcol::python
