// A Python context manager that is entered for the lifetime of an object.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "pyobjects/attributes.h"

namespace funcol::python {

class ContextGuard {
 public:
  // Does nothing for a null `context`.
  explicit ContextGuard(py::object context) : context_(std::move(context)) {
    if (context_) {
      checked(PyObject_CallMethodNoArgs(context_.ptr(), interned<"__enter__">()));
    }
  }
  ~ContextGuard() {
    if (context_) {
      PyObject* arguments[] = {context_.ptr(), Py_None, Py_None, Py_None};             // NOLINT
      auto* const left = PyObject_VectorcallMethod(interned<"__exit__">(), arguments,  // NOLINT
                                                   4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
      left == nullptr ? PyErr_WriteUnraisable(context_.ptr()) : Py_DECREF(left);
    }
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  py::object context_;
};

}  // namespace funcol::python
