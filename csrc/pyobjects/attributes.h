// Attributes of Python objects whose names are known at compile time: each name becomes a Python string once.
// Also the versions that CPython changes with each change of a class or a dict.
//
//   const auto mesh = attribute<"mesh">(spec);
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace funcol::python {

template <size_t length>
struct AttributeName {
  consteval AttributeName(const char (&name)[length]) { std::copy_n(name, length, text); }  // NOLINT

  char text[length] = {};  // NOLINT: a structural type
};

// Returns the name as a Python string, which is never released.
template <AttributeName name>
PyObject* interned() {
  static auto* const text = PyUnicode_InternFromString(name.text);
  return text;
}

// Returns a module's object of a name, looked up once and never released.
template <AttributeName module, AttributeName name>
py::handle imported() {
  static auto* const object =
      py::module::import(module.text).attr(name.text).template cast<py::object>().release().ptr();
  return object;
}

// Returns the new reference that a CPython function returned. If that is null, raises the Python error.
inline py::object checked(PyObject* result) {
  if (result == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

// Returns an attribute. Raises AttributeError if there is none.
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

// Returns an attribute; null if there is none. Raises the error of a property, unless it is AttributeError.
template <AttributeName name>
py::object find_attribute(py::handle object) {
  PyObject* value = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  const int found = PyObject_GetOptionalAttr(object.ptr(), interned<name>(), &value);
#else
  const int found = _PyObject_LookupAttr(object.ptr(), interned<name>(), &value);
#endif
  if (found < 0) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(value);
}

// Makes an object of a subclass of tuple, without the class's own __new__.
inline py::object tuple_object(py::handle type, const py::tuple& items) {
  auto* const of_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  return checked(PyTuple_Type.tp_new(of_type, py::make_tuple(items).ptr(), nullptr));
}

// Makes an object of a NamedTuple class; `items` are objects.
template <typename... Items>
py::object named_tuple(py::handle type, const Items&... items) {
  return tuple_object(type, py::make_tuple(items...));
}

// The index of a name among `names`, found when it is compiled: NameIn<kNames>("mesh_axes").
template <const auto& names>
struct NameIn {
  consteval NameIn(const char* name) {  // NOLINT: callback("mesh_axes")
    while (std::string_view(names.at(index)) != name) {
      ++index;
    }
  }

  size_t index = 0;
};

// Returns the name of the object's class, for messages.
inline const char* type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// Returns the version of a dict; 0 if this Python does not count its changes, 1 for null.
inline uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000  // 3.13 does not count changes of attributes stored inline
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return dict == nullptr ? 1 : reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  return dict == nullptr ? 1 : 0;
#endif
}

// Returns the version of a class and its bases; 0 if no attribute was looked up in the class since its last
// change.
inline uint64_t version_of(const PyTypeObject* type) { return type->tp_version_tag; }

}  // namespace funcol::python
