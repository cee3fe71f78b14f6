// Attributes of Python objects whose names are known at compile time: each name is made a string once.
//
//   const auto mesh = attribute<"mesh">(spec);
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>

namespace funcol::python {

template <size_t length>
struct AttributeName {
  consteval AttributeName(const char (&name)[length]) { std::copy_n(name, length, text); }  // NOLINT

  char text[length] = {};  // NOLINT: a structural type
};

// The name as a Python string, which is never released.
template <AttributeName name>
PyObject* interned() {
  static auto* const text = PyUnicode_InternFromString(name.text);
  return text;
}

// A module's object of a name, looked up once and never released.
template <AttributeName module, AttributeName name>
py::handle imported() {
  static auto* const object =
      py::module::import(module.text).attr(name.text).template cast<py::object>().release().ptr();
  return object;
}

// The new reference that a function of CPython has returned, or, for null, its Python error as an exception.
inline py::object checked(PyObject* result) {
  if (result == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

// Raises AttributeError if there is none.
template <AttributeName name>
py::object attribute(py::handle object) {
  return checked(PyObject_GetAttr(object.ptr(), interned<name>()));
}

template <AttributeName name>
void set_attribute(py::handle object, py::handle value) {
  if (PyObject_SetAttr(object.ptr(), interned<name>(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

// Null, without an error, if there is none.
template <AttributeName name>
py::object find_attribute(py::handle object) {
  PyObject* value = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject_GetOptionalAttr(object.ptr(), interned<name>(), &value);
#else
  _PyObject_LookupAttr(object.ptr(), interned<name>(), &value);
#endif
  if (value == nullptr) {
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(value);
}

// The name of the object's class, for messages.
inline const char* type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

}  // namespace funcol::python
