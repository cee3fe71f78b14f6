#include "pyobjects/callbacks.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace funcol::python {
namespace {

std::array<PyObject*, kCallbackNames.size()> functions{};  // under the GIL; never released

}  // namespace

py::handle callback(Callback which) {
  const auto index = which.index;
  TORCH_CHECK(functions[index] != nullptr, "funcol: Python has not handed over ", kCallbackNames[index],
              "(), which C++ needs. Import the module of funcol whose function was called.");
  return functions[index];
}

void hand_over(const std::string& name, const py::object& function) {
  const auto* const found = std::ranges::find(kCallbackNames, name);
  TORCH_CHECK_VALUE(found != kCallbackNames.end(), "funcol::hand_over: there is no function '", name,
                    "'. Expected a name that _C/callbacks.pyi lists.");
  Py_XSETREF(functions.at(found - kCallbackNames.begin()), function.inc_ref().ptr());
}

}  // namespace funcol::python
