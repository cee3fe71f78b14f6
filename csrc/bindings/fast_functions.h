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

#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"

namespace funcol::python {

using Args = PyObject* const*;

inline PyObject* not_implemented() { Py_RETURN_NOTIMPLEMENTED; }

// Returns the result; NotImplemented for null.
inline PyObject* or_not_implemented(py::object result) {
  return result ? result.release().ptr() : not_implemented();
}

inline void check_count(Py_ssize_t given, Py_ssize_t expected, const char* op) {
  TORCH_CHECK_TYPE(given == expected, "funcol::", op, ": ", given, " arguments, expected ", expected, ".");
}

// Calls `replacement(error)` from now on for each exception that leaves a fast function, and raises the
// result instead, unless that is None. If `replacement` is None, exceptions stay as they are.
//
// This and replace_error() are in bind_installation.cpp.
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

// A fast function of a C++ function of objects, lists, numbers and bools; returns NotImplemented if that
// returns null.
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
