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

// The name as a string of Python's, which is never let go.
template <AttributeName name>
PyObject* interned() {
  static auto* const text = PyUnicode_InternFromString(name.text);
  return text;
}

// What a module has under a name, looked up once and never let go.
template <AttributeName module, AttributeName name>
py::handle imported() {
  static auto* const object =
      py::module::import(module.text).attr(name.text).template cast<py::object>().release().ptr();
  return object;
}

// Null, with the Python error set, if there is none.
template <AttributeName name>
PyObject* new_attribute(py::handle object) {
  return PyObject_GetAttr(object.ptr(), interned<name>());
}

// Raises what looking it up raises: AttributeError if there is none.
template <AttributeName name>
py::object attribute(py::handle object) {
  auto* const value = new_attribute<name>(object);
  if (value == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(value);
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

}  // namespace funcol::python
