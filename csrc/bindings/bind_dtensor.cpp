// csrc/dispatch and csrc/transfer/dtensors for Python. Fast functions return NotImplemented if PyTorch's own
// function has to run.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
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
#include "pyobjects/tensors.h"
#include "sharding/sharding_engine.h"
#include "transfer/dtensors/distribute.h"
#include "transfer/dtensors/full_tensor_stream.h"
#include "transfer/dtensors/owner_transfer.h"
#include "transfer/dtensors/rank_transfer.h"
#include "transfer/dtensors/redistribute_batch.h"
#include "transfer/dtensors/redistribute_local_tensor.h"
#include "transfer/packed_exchange.h"

namespace funcol::python {
namespace {

RedistributionOptions redistribution_options(bool async_op, py::handle model, py::handle max_bytes,
                                             const char* op) {
  RedistributionOptions options{.async_op = async_op};
  if (py::isinstance<py::tuple>(model)) {  // of both meshes
    std::tie(options.model, options.dst_model) = model.cast<std::tuple<CostModel, CostModel>>();
  } else if (!model.is_none()) {
    options.model = model.cast<CostModel>();
  }
  if (!max_bytes.is_none()) {
    options.max_bytes = int_argument(max_bytes.ptr(), "max_bytes", op);
  }
  return options;
}

bool is_dtype_or_none(py::handle object) { return object.is_none() || THPDtype_Check(object.ptr()); }

// Redistributes a DTensor. `mesh` and `order`, a shard order, may be None.
py::object redistribute_dtensor(py::handle dtensor, py::handle mesh, py::handle placements, py::handle order,
                                py::handle forward_dtype, py::handle backward_dtype, bool async_op,
                                py::handle model, py::handle max_bytes) {
  constexpr auto kOp = "redistribute";
  const bool is_on_mesh =
      is_dtensor(dtensor) && (mesh.is_none() || attribute<"device_mesh">(dtensor).is(mesh));
  if (!is_on_mesh || !is_dtype_or_none(forward_dtype) || !is_dtype_or_none(backward_dtype)) {
    return {};
  }
  const auto forward = to_optional_dtype(forward_dtype, kOp);
  return redistribute(
      dtensor,
      {py::reinterpret_borrow<py::object>(placements), py::reinterpret_borrow<py::object>(order), forward,
       forward, to_optional_dtype(backward_dtype, kOp)},
      redistribution_options(async_op, model, max_bytes, kOp));
}

PyObject* layers_are_active(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyBool_FromLong(has_active_layers() ? 1 : 0);
}

py::object redistribute_local_tensor(py::handle local, py::handle src_spec, py::handle dst_spec,
                                     bool async_op, py::handle model, py::handle max_bytes, bool is_explicit,
                                     bool lenient) {
  constexpr auto kOp = "redistribute_local_tensor";
  TORCH_CHECK_TYPE(THPVariable_Check(local.ptr()), "funcol::", kOp, ": got a ", type_name(local),
                   " where a tensor belongs.");
  return redistribute_local(local, src_spec, dst_spec,
                            {redistribution_options(async_op, model, max_bytes, kOp), is_explicit, lenient});
}

py::object redistribute_local_tensors(const py::list& locals, const py::list& src_specs,
                                      const py::list& dst_specs, bool async_op, py::handle model,
                                      py::handle max_bytes, bool is_explicit) {
  return redistribute_locals(locals, src_specs, dst_specs,
                             redistribution_options(async_op, model, max_bytes, "redistribute_many"),
                             is_explicit);
}

// Returns true if a gradient is to be recorded. Raises TypeError unless all objects are DTensors.
bool check_dtensors(const py::list& list) {
  bool needs_gradient = false;
  for (const auto object : list) {
    TORCH_CHECK_TYPE(PyObject_TypeCheck(object.ptr(), dtensor_type()), "funcol::redistribute_many: got a ",
                     type_name(object), ", expected DTensors.");
    needs_gradient = needs_gradient || THPVariable_Unpack(object.ptr()).requires_grad();
  }
  return needs_gradient && at::GradMode::is_enabled();
}

// Redistributes DTensors. `placements`: a tuple for each DTensor, on `mesh`, or on its own mesh if that is
// None. `model` is a pair between meshes. Returns None if a gradient is to be recorded or a layer is active.
py::object redistribute_dtensors(const py::list& dtensors, py::handle mesh, const py::list& placements,
                                 py::handle order, bool async_op, py::handle model, py::handle max_bytes) {
  return check_dtensors(dtensors)
             ? py::none()
             : redistribute_many(dtensors, mesh, placements, order,
                                 redistribution_options(async_op, model, max_bytes, "redistribute_many"));
}

// Distributes `tensor`, a leaf on the mesh's device; `placements` and `src_data_rank` may be None.
py::object distribute(py::handle tensor, py::handle mesh, py::handle placements, py::handle src_data_rank) {
  const auto source =
      src_data_rank.is_none()
          ? std::nullopt
          : std::optional(int_argument(src_data_rank.ptr(), "src_data_rank", "distribute_tensor"));
  return distribute_tensor(THPVariable_Unpack(tensor.ptr()), mesh, placements, source);
}

void bind_fast_functions(py::module m) {
  static PyMethodDef functions[] = {
      forwarded<to_local, "dtensor_to_local">(),
      forwarded<from_local, "dtensor_from_local">(),
      forwarded<redistribute_dtensor, "redistribute_dtensor">(),
      forwarded<full_tensor, "dtensor_full_tensor">(),
      forwarded<redistribute_local_tensor, "redistribute_local_tensor">(),
      forwarded<redistribute_local_tensors, "redistribute_local_tensors">(),
      forwarded<redistribute_dtensors, "redistribute_many">(),
      forwarded<distribute, "distribute_tensor">(),
      {"has_active_layers", layers_are_active, METH_NOARGS, nullptr},
      {},
  };
  add_functions(m, functions);
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
         py::object draw, py::object default_handler, py::object is_unmodified, py::object query_rule,
         py::object forget_upstream_decisions, ShardingEngine* engine, std::optional<UpstreamRules*> rules) {
        install_native_operators({std::move(dispatcher), std::move(propagator), std::move(logger),
                                  std::move(copies), std::move(decide), std::move(draw),
                                  std::move(default_handler), std::move(is_unmodified), std::move(query_rule),
                                  std::move(forget_upstream_decisions), engine, rules.value_or(nullptr)});
      },
      py::arg("dispatcher"), py::arg("propagator"), py::arg("logger"), py::arg("copies"), py::arg("decide"),
      py::arg("draw"), py::arg("default_handler"), py::arg("is_unmodified"), py::arg("query_rule"),
      py::arg("forget_upstream_decisions"), py::arg("engine"), py::arg("rules"));
  m.def("remove_native_operators", remove_native_operators);
  m.def("are_on_one_mesh", are_on_one_mesh, py::arg("tensors"));
  m.def("has_native_operators", has_native_operators);
  m.def("operator_counts", operator_counts);
  m.def("forget_operator_counts", forget_operator_counts);
  m.def("forget_call_plans", forget_call_plans);
  m.def("forget_upstream_decisions_later", forget_upstream_decisions_later);
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

// Binds functions for many weights at once: full tensors one by one, and tensors on owners.
void bind_weights(py::module m) {
  m.attr("EVERY_RANK") = kEveryRank;
  m.attr("NO_RANK") = kNoRank;
  py::class_<FullTensorBucket>(m, "FullTensorBucket")
      .def(py::init<>())
      .def(
          "add",
          [](FullTensorBucket& bucket, py::handle dtensor, int64_t owner, py::handle dtype, int64_t most) {
            return bucket.add(dtensor, owner, dtype.is_none() ? std::nullopt : std::optional(to_dtype(dtype)),
                              most);
          },
          py::arg("dtensor"), py::arg("owner"), py::arg("dtype"), py::arg("most"))
      .def("start", &FullTensorBucket::start)
      .def("next", &FullTensorBucket::next);
  m.def(
      "move_to_owners",
      [](const py::list& dtensors, const std::vector<int64_t>& owners, bool async_op,
         std::optional<int64_t> max_bytes) {
        return move_to_owners(dtensors, owners, {async_op, max_bytes});
      },
      py::arg("dtensors"), py::arg("owners"), py::arg("async_op"), py::arg("max_bytes"));
  m.def(
      "move_from_owners",
      [](const py::list& full_tensors, const py::list& specs, const std::vector<int64_t>& owners,
         const py::list& placements, bool async_op, std::optional<int64_t> max_bytes) {
        return move_from_owners(full_tensors, specs, owners, placements, {async_op, max_bytes});
      },
      py::arg("full_tensors"), py::arg("specs"), py::arg("owners"), py::arg("placements"),
      py::arg("async_op"), py::arg("max_bytes"));
}

}  // namespace

void bind_dtensor(py::module m) {
  bind_fast_functions(m);
  m.def("clear_tables", clear_tables);
  bind_weights(m);
  bind_native_operators(m);
}

}  // namespace funcol::python
