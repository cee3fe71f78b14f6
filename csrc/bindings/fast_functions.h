// Python functions that take their arguments by position, in an array: CPython's cheapest call.
//
//   PyObject* all_reduce(PyObject*, Args args, Py_ssize_t count);
//   static PyMethodDef functions[] = {fast<all_reduce>("all_reduce"), {}};
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "pyobjects/arguments.h"

namespace funcol::python {

using Args = PyObject* const*;

inline PyObject* not_implemented() { Py_RETURN_NOTIMPLEMENTED; }

// NotImplemented for null.
inline PyObject* or_not_implemented(py::object result) {
  return result ? result.release().ptr() : not_implemented();
}

inline void check_count(Py_ssize_t given, Py_ssize_t expected, const char* op) {
  TORCH_CHECK_TYPE(given == expected, "funcol::", op, ": ", given, " arguments, expected ", expected, ".");
}

// Calls `call` with the first of `expected` arguments: a plain tensor, or a list of them. NotImplemented for
// any other.
template <typename Call>
PyObject* with_input(Args args, Py_ssize_t count, Py_ssize_t expected, const char* op, const Call& call) {
  HANDLE_TH_ERRORS
  check_count(count, expected, op);
  const auto input = tensor_argument(args[0], op);
  check_no_tangents(args, 1, op);
  return input.defined() ? call(input) : not_implemented();
  END_HANDLE_TH_ERRORS
}

template <typename Call>
PyObject* with_inputs(Args args, Py_ssize_t count, Py_ssize_t expected, const char* op, const Call& call) {
  HANDLE_TH_ERRORS
  check_count(count, expected, op);
  std::vector<at::Tensor> inputs;
  const bool are_plain = tensors_argument(args[0], inputs, op);
  if (PyList_Check(args[0]) || PyTuple_Check(args[0])) {
    check_no_tangents(PySequence_Fast_ITEMS(args[0]), PySequence_Fast_GET_SIZE(args[0]), op);
  }
  return are_plain ? call(inputs) : not_implemented();
  END_HANDLE_TH_ERRORS
}

// Calls `replacement(error)` from now on for each exception that leaves a function here. What it returns is
// raised in the place of the exception, unless that is None. None in its own place: nothing is called.
void replace_errors(py::handle replacement);

// The same for the exception that is set now.
void replace_error();

template <PyObject* (*function)(PyObject*, Args, Py_ssize_t)>
PyObject* with_errors_replaced(PyObject* module, Args args, Py_ssize_t count) {
  PyObject* const result = function(module, args, count);
  if (result == nullptr) [[unlikely]] {
    replace_error();
  }
  return result;
}

template <PyObject* (*function)(PyObject*, Args, Py_ssize_t)>
PyMethodDef fast(const char* name) {
  // CPython stores every calling convention as PyCFunction and casts it back by the flag.
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(with_errors_replaced<function>)),
          METH_FASTCALL,  // NOLINT
          nullptr};
}

}  // namespace funcol::python
