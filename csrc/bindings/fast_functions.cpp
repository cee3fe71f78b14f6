#include "bindings/fast_functions.h"

namespace funcol::python {
namespace {

PyObject* replacement = nullptr;  // under the GIL

}  // namespace

void replace_errors(py::handle function) {
  Py_XDECREF(replacement);
  replacement = function.is_none() ? nullptr : function.inc_ref().ptr();
}

void replace_error() {
  if (replacement == nullptr) {
    return;
  }
  py::error_already_set error;  // takes it
  const auto other = py::reinterpret_steal<py::object>(PyObject_CallOneArg(replacement, error.value().ptr()));
  if (!other) {
    PyErr_Clear();  // the error of the call counts
  }
  if (!other || other.is_none()) {
    error.restore();
    return;
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(other.ptr())), other.ptr());
}

}  // namespace funcol::python
