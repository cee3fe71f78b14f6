// Attributes of PyTorch's DTensorSpec that only some minors have.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::compat {

// Returns true if strided shards of a spec represent a shard order. Older PyTorch releases do not distinguish
// the two: there a strided shard represents itself. Needs the GIL.
inline bool strided_shards_stand_for_order(py::handle spec) {
  static auto* const name = PyUnicode_InternFromString("use_strided_shard_as_shard_order");
  return py::getattr(spec, name, Py_None).ptr() == Py_True;
}

}  // namespace funcol::compat
