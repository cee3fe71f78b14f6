#include "pyobjects/callbacks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace funcol::python {
namespace {

constexpr std::array<std::string_view, 12> kNames = {
    "mesh_axes",
    "make_spec",
    "redistribution_target",
    "axis_group",
    "ranks_of_mesh",
    "note_redistribution",
    "apply_mask",
    "fill_mask",
    "gradient_of_to_local",
    "gradient_of_from_local",
    "gradient_of_redistribute",
    "mesh_pair",
};

std::array<PyObject*, kNames.size()> functions{};  // under the GIL; never released

}  // namespace

py::handle callback(Callback which) {
  const auto index = static_cast<size_t>(which);
  TORCH_CHECK(functions[index] != nullptr, "funcol: Python has not handed over ", kNames[index],
              "(), which C++ needs. Import the module of funcol whose function was called.");
  return functions[index];
}

void hand_over(const std::string& name, const py::object& function) {
  const auto* const found = std::ranges::find(kNames, name);
  TORCH_CHECK_VALUE(found != kNames.end(), "funcol::hand_over: there is no function '", name,
                    "'. Expected a name that _C/callbacks.pyi lists.");
  Py_XSETREF(functions[static_cast<size_t>(found - kNames.begin())], function.inc_ref().ptr());
}

}  // namespace funcol::python
