// Numbers that CPython changes with each change of a class or a dict.
#pragma once

#include <torch/csrc/python_headers.h>

#include <cstdint>

namespace funcol::python {

// Returns the version of a dict; 0 if this Python does not count its changes, 1 for null.
inline uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000  // 3.13 counts no change of an attribute that lies in the object
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
