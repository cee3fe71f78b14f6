// csrc/dispatch, csrc/sharding and csrc/transfer/dtensors for Python. Fast functions return NotImplemented
// where PyTorch's own function has to run.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "async/dispatch_modes.h"
#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "dispatch/fast_dispatch.h"
#include "dispatch/mixed_tensors.h"
#include "dispatch/redistribute.h"
#include "dispatch/supported_dtensor.h"
#include "dispatch/to_local_from_local.h"
#include "layout/tables.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/dtypes.h"
#include "sharding/cost_table.h"
#include "sharding/local_sizes.h"
#include "sharding/sharding_engine.h"
#include "transfer/dtensors/distribute.h"
#include "transfer/dtensors/rank_transfer.h"
#include "transfer/dtensors/redistribute_batch.h"
#include "transfer/dtensors/redistribute_local_tensor.h"
#include "transfer/packed_exchange.h"

namespace funcol::python {
namespace {

std::optional<CostModel> model_argument(PyObject* model) {
  return model == Py_None ? std::nullopt : std::optional(py::handle(model).cast<CostModel>());
}

std::optional<int64_t> bound_argument(PyObject* bound, const char* op) {
  return bound == Py_None ? std::nullopt : std::optional(int_argument(bound, "max_bytes", op));
}

RedistributionOptions redistribution_options(PyObject* async_op, PyObject* model, PyObject* bound,
                                             const char* op) {
  return {async_op == Py_True, model_argument(model), bound_argument(bound, op)};
}

bool is_dtype_or_none(PyObject* object) { return object == Py_None || THPDtype_Check(object); }

py::list list_argument(PyObject* list) { return py::reinterpret_borrow<py::list>(list); }

// (dtensor, mesh or None, placements, shard order or None, forward_dtype, backward_dtype, async_op, model,
// max_bytes)
PyObject* redistribute_dtensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr auto kOp = "redistribute";
  check_count(count, 9, kOp);
  const bool is_on_mesh =
      is_dtensor(args[0]) && (args[1] == Py_None || attribute<"device_mesh">(args[0]).ptr() == args[1]);
  if (!is_on_mesh || !is_dtype_or_none(args[4]) || !is_dtype_or_none(args[5])) {
    return not_implemented();
  }
  const auto forward_dtype = to_optional_dtype(args[4], kOp);
  const auto placements = py::reinterpret_borrow<py::object>(args[2]);
  const auto order = py::reinterpret_borrow<py::object>(args[3]);
  return or_not_implemented(redistribute(
      args[0], {placements, order, forward_dtype, forward_dtype, to_optional_dtype(args[5], kOp)},
      redistribution_options(args[6], args[7], args[8], kOp)));
  END_HANDLE_TH_ERRORS
}

PyObject* layers_are_active(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyBool_FromLong(has_active_layers() ? 1 : 0);
}

// (local, source spec, target spec, async_op, model, max_bytes, is_explicit, lenient)
PyObject* redistribute_local_tensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr auto kOp = "redistribute_local_tensor";
  check_count(count, 8, kOp);
  TORCH_CHECK_TYPE(THPVariable_Check(args[0]), "funcol::", kOp, ": got a ", type_name(args[0]),
                   " where a tensor belongs.");
  return or_not_implemented(redistribute_local(
      args[0], args[1], args[2],
      {redistribution_options(args[3], args[4], args[5], kOp), args[6] == Py_True, args[7] == Py_True}));
  END_HANDLE_TH_ERRORS
}

// (locals, source specs, target specs, async_op, model, max_bytes, is_explicit)
PyObject* redistribute_local_tensors(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 7, "redistribute_many");
  return redistribute_locals(list_argument(args[0]), list_argument(args[1]), list_argument(args[2]),
                             redistribution_options(args[3], args[4], args[5], "redistribute_many"),
                             args[6] == Py_True)
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

// True if a gradient is to be recorded. TypeError unless the object is a DTensor.
bool check_dtensors(PyObject* list) {
  bool needs_gradient = false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    auto* const object = PyList_GET_ITEM(list, i);
    TORCH_CHECK_TYPE(PyObject_TypeCheck(object, dtensor_type()), "funcol::redistribute_many: got a ",
                     type_name(object), ", expected DTensors.");
    needs_gradient = needs_gradient || THPVariable_Unpack(object).requires_grad();
  }
  return needs_gradient && at::GradMode::is_enabled();
}

// (DTensors, tuple of placements for each, async_op, model, max_bytes); None if a gradient is to be recorded
// or a layer watches.
PyObject* redistribute_dtensors(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 5, "redistribute_many");
  if (check_dtensors(args[0])) {
    Py_RETURN_NONE;
  }
  return or_not_implemented(
      redistribute_many(list_argument(args[0]), list_argument(args[1]),
                        redistribution_options(args[2], args[3], args[4], "redistribute_many")));
  END_HANDLE_TH_ERRORS
}

// (tensor, mesh, placements or None, src_data_rank or None); the tensor is a leaf on the mesh's device.
PyObject* distribute(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr auto kOp = "distribute_tensor";
  check_count(count, 4, kOp);
  const auto source =
      args[3] == Py_None ? std::nullopt : std::optional(int_argument(args[3], "src_data_rank", kOp));
  return or_not_implemented(distribute_tensor(THPVariable_Unpack(args[0]), args[1], args[2], source));
  END_HANDLE_TH_ERRORS
}

void bind_fast_functions(PyObject* module) {
  static PyMethodDef functions[] = {
      forwarded<to_local, "dtensor_to_local">(),
      forwarded<from_local, "dtensor_from_local">(),
      fast<redistribute_dtensor>("redistribute_dtensor"),
      forwarded<full_tensor, "dtensor_full_tensor">(),
      fast<redistribute_local_tensor>("redistribute_local_tensor"),
      fast<redistribute_local_tensors>("redistribute_local_tensors"),
      fast<redistribute_dtensors>("redistribute_many"),
      fast<distribute>("distribute_tensor"),
      {"has_active_layers", layers_are_active, METH_NOARGS, nullptr},
      {},
  };
  add_functions(module, functions);
}

void bind_local_sizes(py::module m) {
  py::class_<LocalSizePlaces>(m, "LocalSizeArgs")
      .def_readonly("shape", &LocalSizePlaces::shape)
      .def_readonly("stride", &LocalSizePlaces::stride)
      .def_readonly("batch_channels_pixels", &LocalSizePlaces::batch_channels_pixels)
      .def_readonly("squeezed_dims", &LocalSizePlaces::squeezed_dims);
  m.def("local_size_args", local_size_places, py::arg("op"));
  m.def("local_shape_of", local_shape_of, py::arg("spec"), py::arg("shape"));
  m.def("shard_cuts", shard_cuts, py::arg("spec"), py::arg("num_dims"));
  m.def("uneven_axes", uneven_axes, py::arg("spec"), py::arg("shape"));
}

std::map<std::string, size_t> of_tables(size_t Table::*member) {
  std::map<std::string, size_t> values;
  for (const auto& [name, table] : tables()) {
    values[name] = table.*member;
  }
  return values;
}

void bind_native_operators(py::module m) {
  m.def(
      "install_native_operators",
      [](py::object dispatcher, py::object propagator, py::object logger, py::set copies, py::object decide,
         py::object draw, py::object own_handler, py::object is_own, py::object ask, ShardingEngine* engine,
         std::optional<UpstreamRules*> rules) {
        install_native_operators({std::move(dispatcher), std::move(propagator), std::move(logger),
                                  std::move(copies), std::move(decide), std::move(draw),
                                  std::move(own_handler), std::move(is_own), std::move(ask), engine,
                                  rules.value_or(nullptr)});
      },
      py::arg("dispatcher"), py::arg("propagator"), py::arg("logger"), py::arg("copies"), py::arg("decide"),
      py::arg("draw"), py::arg("own_handler"), py::arg("is_own"), py::arg("ask"), py::arg("engine"),
      py::arg("rules"));
  m.def("remove_native_operators", remove_native_operators);
  m.def("are_on_one_mesh", are_on_one_mesh, py::arg("tensors"));
  m.def("serves_operators", serves_operators);
  m.def("operator_counts", operator_counts);
  m.def("forget_operator_counts", forget_operator_counts);
  m.def("forget_call_plans", forget_call_plans);
  m.def("table_sizes", [] {
    auto sizes = table_sizes();
    sizes["known_meshes"] = num_known_meshes();
    sizes["signatures"] = num_shared_signatures();
    return sizes;
  });
  m.def("table_bytes", [] { return of_tables(&Table::bytes); });
  m.def("table_limits", [] { return of_tables(&Table::limit); });
  m.def("set_table_limit",
        [](const std::string& name, size_t bytes) { set_table_limit(find_table(name), bytes); });
}

}  // namespace

void bind_dtensor(PyObject* module) {
  bind_fast_functions(module);
  auto m = py::reinterpret_borrow<py::module>(module);
  bind_local_sizes(m);
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
           py::arg("whole"), py::arg("assemble"), py::arg("remember"))
      .def("propagate_as_pytorch", &ShardingEngine::propagate_as_pytorch, py::arg("op_schema"),
           py::arg("rules"), py::arg("rule_of"), py::arg("otherwise"), py::arg("assemble"),
           py::arg("remember"))
      .def("strategies", &ShardingEngine::strategies, py::arg("op_schema"), py::arg("rows_of"))
      .def("time_decision", &ShardingEngine::time_decision, py::arg("op_schema"), py::arg("count"))
      .def("leave", &ShardingEngine::leave, py::arg("op"))
      .def("clear", &ShardingEngine::clear)
      .def("info", &ShardingEngine::info);
  m.def("redistribute_cost_table", redistribute_cost_table, py::arg("sources"), py::arg("targets"),
        py::arg("model"));
  m.def("clear_tables", clear_tables);
  bind_native_operators(m);
}

}  // namespace funcol::python
