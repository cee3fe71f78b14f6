// Attributes of PyTorch's DTensorSpec that only some PyTorch releases have.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

namespace funcol::compat {

// Returns true if strided shards of a spec represent a shard order. Older PyTorch releases do not distinguish
// the two: there a strided shard represents itself. Needs the GIL.
inline bool strided_shards_represent_shard_order(py::handle spec) {
  static auto* const name = PyUnicode_InternFromString("use_strided_shard_as_shard_order");
  return py::getattr(spec, name, Py_None).ptr() == Py_True;
}

// Returns the hash of a spec that has tensor_meta but no hash yet. PyTorch 2.15 hashes a tuple of these
// fields; a spec of an older release hashes itself. Needs the GIL.
inline Py_hash_t hash_of_spec(py::handle spec) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15
  const auto meta = py::reinterpret_borrow<py::tuple>(spec.attr("tensor_meta"));
  const auto hashed = py::make_tuple(spec.attr("mesh"), spec.attr("placements"), spec.attr("shard_order"),
                                     meta[0], meta[1], meta[2]);
  const auto hash = PyObject_Hash(hashed.ptr());
#else
  const auto hash = PyObject_Hash(spec.ptr());
#endif
  if (hash == -1) {
    throw py::error_already_set();
  }
  return hash;
}

}  // namespace funcol::compat
