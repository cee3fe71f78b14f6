// csrc/propagation, csrc/sharding and the specs of csrc/pyobjects for Python.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "propagation/propagator.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/spec_methods.h"
#include "pyobjects/specs.h"
#include "sharding/cost_table.h"
#include "sharding/local_sizes.h"
#include "sharding/sharding_engine.h"

namespace funcol::python {

void bind_propagation(py::module m) {
  py::register_exception<NoRuleError>(m, "NoRuleError", PyExc_NotImplementedError);
  m.def("ops_with_rules", ops_with_rules);
  m.def(
      "has_rule", [](const std::string& op) { return find_rule(op) != nullptr; }, py::arg("op"));
  m.def("similar_ops", similar_ops, py::arg("op"));
  m.def("is_per_element", is_per_element, py::arg("op"));
  py::class_<LocalSizePlaces>(m, "LocalSizeArgs")
      .def_readonly("shape", &LocalSizePlaces::shape)
      .def_readonly("stride", &LocalSizePlaces::stride)
      .def_readonly("batch_channels_pixels", &LocalSizePlaces::batch_channels_pixels)
      .def_readonly("squeezed_dims", &LocalSizePlaces::squeezed_dims);
  m.def("local_size_args", local_size_places, py::arg("op"));
  m.def("local_shape_of", local_shape_of, py::arg("spec"), py::arg("shape"));
  m.def("shard_cuts", shard_cuts, py::arg("spec"), py::arg("num_dims"));
  m.def("uneven_axes", uneven_axes, py::arg("spec"), py::arg("shape"));
  py::class_<UpstreamRules>(m, "UpstreamRules")
      .def(py::init<py::object, py::dict, py::dict>(), py::arg("base"), py::arg("own"), py::arg("replaced"))
      .def("is_in_cpp", &UpstreamRules::is_in_cpp, py::arg("op"))
      .def("clear", &UpstreamRules::clear);
  m.def("count_decision", count_decision, py::arg("op"), py::arg("reason"));
  m.def("decision_counts", decision_counts);
  m.def("forget_decision_counts", forget_decision_counts);
  py::class_<ShardingEngine>(m, "ShardingEngine")
      .def(py::init<std::optional<CostModel>, size_t, bool>(), py::arg("model"), py::arg("capacity"),
           py::arg("moves_keywords") = false)
      .def("propagate", &ShardingEngine::propagate, py::arg("op_schema"), py::arg("rows_of"),
           py::arg("fallback"), py::arg("assemble"), py::arg("remember"))
      .def("propagate_as_pytorch", &ShardingEngine::propagate_as_pytorch, py::arg("op_schema"),
           py::arg("rules"), py::arg("rule_of"), py::arg("otherwise"), py::arg("assemble"),
           py::arg("remember"))
      .def("strategies", &ShardingEngine::strategies, py::arg("op_schema"), py::arg("rows_of"))
      .def("time_decision", &ShardingEngine::time_decision, py::arg("op_schema"), py::arg("count"))
      .def("disable_rule", &ShardingEngine::disable_rule, py::arg("op"))
      .def("clear", &ShardingEngine::clear)
      .def("info", &ShardingEngine::info);
  m.def("redistribute_cost_table", redistribute_cost_table, py::arg("sources"), py::arg("targets"),
        py::arg("model"));
  m.def("register_callback", register_callback, py::arg("name"), py::arg("function"));
  m.def("copy_spec", copy_spec, py::arg("spec"));
  m.def("spec_methods", spec_methods, py::arg("type"), py::arg("equals"), py::arg("hash"));
  m.def("placement_methods", placement_methods, py::arg("types"), py::arg("equals"));
  m.def("canonical_spec", canonical_spec, py::arg("spec"));
}

}  // namespace funcol::python
