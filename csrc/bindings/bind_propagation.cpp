// The room csrc/propagation for Python: which operators have rules.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "bindings/bindings.h"
#include "propagation/propagator.h"

namespace funcol::python {

void bind_propagation(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module>(module);
  py::register_exception<NoRuleError>(m, "NoRuleError", PyExc_NotImplementedError);
  m.def("ops_with_rules", ops_with_rules);
  m.def(
      "has_rule", [](const std::string& op) { return find_rule(op) != nullptr; }, py::arg("op"));
  m.def("similar_ops", similar_ops, py::arg("op"));
  m.def("is_per_element", is_per_element, py::arg("op"));
}

}  // namespace funcol::python
