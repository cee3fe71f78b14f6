// Python functions that take their arguments by position, in an array: CPython's cheapest call.
//
//   PyObject* all_reduce(PyObject*, Args args, Py_ssize_t count);
//   static PyMethodDef functions[] = {fast<all_reduce>("all_reduce"), {}};
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"

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

// Calls `call` with the first of `expected` arguments, a plain tensor, or a list of them in with_inputs().
// NotImplemented for other arguments.
template <typename Call>
PyObject* with_input(Args args, Py_ssize_t count, Py_ssize_t expected, const char* op, const Call& call) {
  HANDLE_TH_ERRORS
  check_count(count, expected, op);
  refuse_dtensor(args[0], op);
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
  if (PyList_Check(args[0]) || PyTuple_Check(args[0])) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(args[0]); ++i) {
      refuse_dtensor(PySequence_Fast_GET_ITEM(args[0], i), op);
    }
  }
  const bool are_plain = tensors_argument(args[0], inputs, op);
  if (PyList_Check(args[0]) || PyTuple_Check(args[0])) {
    check_no_tangents(PySequence_Fast_ITEMS(args[0]), PySequence_Fast_GET_SIZE(args[0]), op);
  }
  return are_plain ? call(inputs) : not_implemented();
  END_HANDLE_TH_ERRORS
}

// Calls `replacement(error)` from now on for each exception that leaves a fast function, and raises the
// result instead, unless that is None. If `replacement` is None, exceptions stay as they are.
void replace_errors(py::handle replacement);

// Replaces the exception that is set now in the same way.
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

// Adds an array of methods that ends with an empty one.
inline void add_functions(const py::module& m, PyMethodDef* functions) {
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
}

template <typename Parameter>
decltype(auto) argument(PyObject* object, const char* op) {
  if constexpr (std::is_same_v<Parameter, int64_t>) {
    return int_argument(object, "a number of ranks", op);
  } else if constexpr (std::is_same_v<Parameter, bool>) {
    return object == Py_True;
  } else if constexpr (std::is_same_v<Parameter, const py::list&>) {
    return py::reinterpret_borrow<py::list>(object);
  } else {
    return py::handle(object);
  }
}

// A fast function of a C++ function of objects, lists, numbers and bools; NotImplemented where that returns
// null.
template <auto function, AttributeName name>
struct Forwarded;

template <typename Result, typename... Parameters, Result (*function)(Parameters...), AttributeName name>
struct Forwarded<function, name> {
  static PyObject* call(PyObject* /*module*/, Args args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    check_count(count, sizeof...(Parameters), name.text);
    return [&]<size_t... places>(std::index_sequence<places...>) {
      return or_not_implemented(function(argument<Parameters>(args[places], name.text)...));
    }
    (std::index_sequence_for<Parameters...>());
    END_HANDLE_TH_ERRORS
  }
};

template <auto function, AttributeName name>
PyMethodDef forwarded() {
  return fast<Forwarded<function, name>::call>(name.text);
}

}  // namespace funcol::python
