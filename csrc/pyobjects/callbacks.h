// Functions of funcol's Python side that C++ calls.
//
// C++ imports none of funcol's Python modules: each module registers its functions with register_callback()
// when it is loaded. python/funcol/_C/callbacks.pyi has their types, at register_callback().
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>

#include "pyobjects/attributes.h"

namespace funcol::python {

inline constexpr std::array kCallbackNames = {
    "mesh_axes",              // sizes and names of a DeviceMesh's axes, and their groups
    "make_spec",              // a DTensorSpec of its parts
    "redistribution_target",  // the DTensorSpec that placements lead to
    "axis_group",             // the process group along axes of a mesh
    "ranks_of_mesh",          // the default group, and the mesh's ranks in it
    "note_redistribution",    // a context in which PyTorch's DebugMode notes a redistribution
    "apply_mask",             // a mask partial applied to a local tensor
    "fill_mask",              // a local tensor of a mask partial made
    "gradient_of_to_local",   // gradients of DTensor's methods that C++ does not handle
    "gradient_of_from_local",
    "gradient_of_redistribute",
    "mesh_pair",  // ranks of two meshes, and a process group of all of them
};
using Callback = NameIn<kCallbackNames>;

inline std::array<PyObject*, kCallbackNames.size()> callbacks{};  // under the GIL; never released

// Returns a registered function. Raises RuntimeError naming it if the module that has it is not loaded.
inline py::handle callback(Callback which) {
  auto* const function = callbacks.at(which.index);
  TORCH_CHECK(function != nullptr, "funcol: Python has not registered ", kCallbackNames.at(which.index),
              "(), which C++ needs. Import the module of funcol whose function was called.");
  return function;
}

// Registers the function of `name`, a name in _C/callbacks.pyi. Raises ValueError for other names. The
// function is kept until another one replaces it.
inline void register_callback(const std::string& name, const py::object& function) {
  const auto* const found = std::ranges::find(kCallbackNames, name);
  TORCH_CHECK_VALUE(found != kCallbackNames.end(), "funcol::register_callback: there is no function '", name,
                    "'. Expected a name that _C/callbacks.pyi lists.");
  Py_XSETREF(callbacks.at(found - kCallbackNames.begin()), function.inc_ref().ptr());
}

}  // namespace funcol::python
