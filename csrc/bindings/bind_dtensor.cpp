// DTensor's methods for Python: a call each, and NotImplemented for what PyTorch's own function has to do.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "async/layers.h"
#include "bindings/attributes.h"
#include "bindings/bindings.h"
#include "bindings/dtensor_calls.h"
#include "bindings/dtensor_objects.h"
#include "bindings/fast_functions.h"
#include "bindings/python_op_schema.h"
#include "bindings/redistribution_specs.h"

namespace funcol::python {
namespace {

PyObject* or_not_implemented(py::object result) {
  return result ? result.release().ptr() : not_implemented();
}

// (dtensor, grad_placements)
PyObject* dtensor_to_local(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "to_local");
  return or_not_implemented(to_local(args[0], args[1]));
  END_HANDLE_TH_ERRORS
}

// (local, mesh, placements, shape, stride, grad_placements)
PyObject* dtensor_from_local(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 6, "from_local");
  return or_not_implemented(from_local(args[0], args[1], args[2], args[3], args[4], args[5]));
  END_HANDLE_TH_ERRORS
}

// (dtensor, placements, async_op)
PyObject* redistribute_dtensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 3, "redistribute");
  return or_not_implemented(redistribute(args[0], args[1], args[2] == Py_True));
  END_HANDLE_TH_ERRORS
}

// (dtensor, grad_placements)
PyObject* dtensor_full_tensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "full_tensor");
  return or_not_implemented(full_tensor(args[0], args[1]));
  END_HANDLE_TH_ERRORS
}

// The DTensors of an operator's local results, one by one or in a list or tuple; a null object if there is
// something else among them.
py::object wrapped(py::handle local, py::handle spec) {
  if (THPVariable_Check(local.ptr())) {
    if (!is_spec(spec)) {
      return {};
    }
    return make_dtensor(local.ptr(), spec, THPVariable_Unpack(local.ptr()).requires_grad());
  }
  const bool is_list = PyList_CheckExact(local.ptr());
  const bool has_specs = PyTuple_CheckExact(spec.ptr()) || PyList_CheckExact(spec.ptr());
  if (!has_specs || (!is_list && !PyTuple_CheckExact(local.ptr())) ||
      PySequence_Fast_GET_SIZE(local.ptr()) != PySequence_Fast_GET_SIZE(spec.ptr())) {
    return {};
  }
  const auto count = PySequence_Fast_GET_SIZE(local.ptr());
  auto results = py::reinterpret_steal<py::object>(is_list ? PyList_New(count) : PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::handle of_result = PySequence_Fast_GET_ITEM(local.ptr(), i);
    auto result =
        of_result.is_none() ? py::none() : wrapped(of_result, PySequence_Fast_GET_ITEM(spec.ptr(), i));
    if (!result) {
      return {};
    }
    is_list ? PyList_SET_ITEM(results.ptr(), i, result.release().ptr())
            : PyTuple_SET_ITEM(results.ptr(), i, result.release().ptr());
  }
  return results;
}

// (local results, specs)
PyObject* wrap_dtensors(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "wrap");
  return has_active_layers() ? not_implemented() : or_not_implemented(wrapped(args[0], args[1]));
  END_HANDLE_TH_ERRORS
}

bool equal(const py::object& one, const py::object& other) {
  const int result = one.is(other) ? 1 : PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
  if (result < 0) {
    throw py::error_already_set();
  }
  return result == 1;
}

// As values where they are of known kinds: Python's comparison takes ten times as long.
bool same_placements(const py::object& one, const py::object& other) {
  if (one.is(other)) {
    return true;
  }
  try {
    return to_placements(one) == to_placements(other);
  } catch (const c10::Error&) {
    return equal(one, other);
  }
}

// Whether two specs of a tensor hold it alike.
bool same_layout(py::handle a, py::handle b) {
  return a.is(b) || (same_placements(attribute<"placements">(a), attribute<"placements">(b)) &&
                     equal(attribute<"shard_order">(a), attribute<"shard_order">(b)));
}

// The local tensor of `source` as `target` wants it; by Python where placements have rules of their own, and
// where it has another shape than `source` gives it.
py::object moved(py::handle local, py::handle source, py::handle target) {
  PyObject* const args[] = {local.ptr(), source.ptr(), target.ptr(), Py_False,
                            Py_None,     Py_None,      Py_False,     /*lenient=*/Py_True};
  auto result = py::reinterpret_steal<py::object>(redistribute_local_tensor(nullptr, args, 8));
  if (result && !result.is(py::handle(Py_NotImplemented))) {
    return result;
  }
  if (!result) {
    if (PyErr_ExceptionMatches(PyExc_NotImplementedError) == 0) {
      throw py::error_already_set();
    }
    PyErr_Clear();
  }
  return py::module::import("funcol.dtensor").attr("redistribute_local_tensor")(local, source, target);
}

// The local keyword arguments as a schema of funcol.keyword_tensors wants them.
py::object moved_keywords(py::handle schema, py::object locals) {
  const auto held = find_attribute<"held_kwargs">(schema);
  if (!held) {
    return locals;
  }
  const auto wanted = attribute<"kwargs_schema">(schema).cast<py::dict>();
  py::dict given(locals.attr("copy")());
  for (const auto& [name, source] : held.cast<py::dict>()) {
    const py::object target = wanted[name];
    if (!same_layout(source, target)) {
      given[name] = moved(given[name], source, target);
    }
  }
  return given;  // NOLINT: no move, pybind11 converts
}

// As the dispatcher flattened arguments: optree where it is installed.
py::handle pytree() { return imported<"torch.distributed.tensor._dispatch", "pytree">(); }

// (dispatcher, operator, OpInfo, first_moved): the operator on local tensors, its arguments changed as the
// decision says. If the first one moved, first_moved(operator, local, spec, moved, its spec) is called then.
PyObject* run_changed(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 4, "local_results");
  const py::handle info = args[2];
  const auto sharding = attribute<"output_sharding">(info);
  const auto schema = attribute<"redistribute_schema">(sharding);
  if (has_active_layers() || schema.is_none() ||
      !attribute<"needs_redistribute">(sharding).is(py::handle(Py_True)) || observes_redistribution() ||
      !known_mesh(attribute<"compute_mesh">(info)).coordinate.has_value()) {
    return not_implemented();
  }
  const auto random = PySet_Contains(attribute<"_random_ops">(args[0]).ptr(), args[1]);
  const auto held = attribute<"flat_args_schema">(info);
  const auto structure = attribute<"args_tree_spec">(info);
  auto wanted = attribute<"args_schema">(schema);
  if (!structure.is_none()) {
    wanted = py::tuple(pytree().attr("tree_leaves")(wanted));
  }
  const auto locals = attribute<"local_args">(info);
  if (random != 0 || !PyList_Check(held.ptr()) || !PyTuple_Check(wanted.ptr()) ||
      !PyTuple_Check(locals.ptr())) {
    PyErr_Clear();
    return not_implemented();
  }
  const bool takes_values = attribute<"use_val_from_redistribute_schema">(sharding).is(py::handle(Py_True));
  const auto num_held = PyList_GET_SIZE(held.ptr());
  const auto num_wanted = PyTuple_GET_SIZE(wanted.ptr());
  if (num_wanted < num_held || PyTuple_GET_SIZE(locals.ptr()) != num_held) {
    return not_implemented();
  }
  py::list given(takes_values ? num_wanted : num_held);
  bool first_moved = false;
  for (Py_ssize_t i = 0; i < static_cast<Py_ssize_t>(given.size()); ++i) {
    const py::handle target = PyTuple_GET_ITEM(wanted.ptr(), i);
    const py::handle source = i < num_held ? PyList_GET_ITEM(held.ptr(), i) : target.ptr();
    if (i < num_held && is_spec(source)) {
      const py::handle local = PyTuple_GET_ITEM(locals.ptr(), i);
      const bool stays = same_layout(source, target);
      first_moved = first_moved || (i == 0 && !stays);
      given[i] = stays ? py::reinterpret_borrow<py::object>(local) : moved(local, source, target);
    } else {
      given[i] = takes_values ? target : source;
    }
  }
  const py::tuple arguments(structure.is_none() ? py::object(given)
                                                : pytree().attr("tree_unflatten")(given, structure));
  const auto keywords = moved_keywords(schema, attribute<"local_kwargs">(info));
  auto* const result = PyObject_Call(attribute<"op">(schema).ptr(), arguments.ptr(), keywords.ptr());
  if (result == nullptr) {
    throw py::error_already_set();
  }
  auto results = py::reinterpret_steal<py::object>(result);
  if (first_moved) {
    const py::handle local = PyTuple_GET_ITEM(locals.ptr(), 0);
    const py::handle source = PyList_GET_ITEM(held.ptr(), 0);
    const py::handle target = PyTuple_GET_ITEM(wanted.ptr(), 0);
    const py::handle then = args[3];
    then(py::handle(args[1]), local, source, given[0], target);
  }
  return results.release().ptr();
  END_HANDLE_TH_ERRORS
}

// Whether the arguments of `op` have to be flattened as a tree.
bool needs_pytree(py::handle dispatcher, PyObject* op) {
  const auto propagator = attribute<"sharding_propagator">(dispatcher);
  for (const auto& table : {find_attribute<"op_to_schema_info">(propagator),
                            find_attribute<"op_to_schema_info_for_single_dim_strategy">(propagator)}) {
    if (!table) {
      continue;
    }
    if (!PyDict_Check(table.ptr())) {
      return true;
    }
    auto* const info = PyDict_GetItemWithError(table.ptr(), op);
    if (info == nullptr && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    if (info != nullptr && info != Py_None) {
      return !attribute<"needs_pytree">(info).is(py::handle(Py_False));
    }
  }
  return false;
}

bool holds_tensors(PyObject* argument) {
  if (!PyList_Check(argument) && !PyTuple_Check(argument)) {
    return false;
  }
  PyObject** const items = PySequence_Fast_ITEMS(argument);
  return std::any_of(items, items + PySequence_Fast_GET_SIZE(argument),
                     [](PyObject* item) { return THPVariable_Check(item); });
}

// (dispatcher, operator, args, kwargs, create_schema): the OpInfo without a schema, of plain DTensors among
// arguments that are no tensors.
PyObject* unwrap_args(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 5, "unwrap");
  auto* const make = imported<"torch.distributed.tensor._op_schema", "OpInfo">().ptr();
  if (args[4] != Py_False || !PyTuple_Check(args[2]) || PyDict_GET_SIZE(args[3]) != 0 ||
      needs_pytree(args[0], args[1])) {
    return not_implemented();
  }
  const auto num_args = PyTuple_GET_SIZE(args[2]);
  py::list schema(num_args);
  py::tuple locals(num_args);
  py::object mesh;
  for (Py_ssize_t i = 0; i < num_args; ++i) {
    const py::handle argument = PyTuple_GET_ITEM(args[2], i);
    if (Py_TYPE(argument.ptr()) == dtensor_type()) {
      auto spec = attribute<"_spec">(argument);
      if (!mesh) {
        mesh = attribute<"mesh">(spec);
      }
      schema[i] = std::move(spec);
      locals[i] = attribute<"_local_tensor">(argument);
    } else if (THPVariable_Check(argument.ptr()) || holds_tensors(argument.ptr())) {
      return not_implemented();
    } else {
      schema[i] = argument;
      locals[i] = argument;
    }
  }
  if (!mesh) {
    return not_implemented();
  }
  return py::handle(make)(mesh, py::none(), schema, locals, py::dict(), py::none()).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* is_watched(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyBool_FromLong(has_active_layers() ? 1 : 0);
}

}  // namespace

void bind_dtensor(PyObject* module) {
  static PyMethodDef functions[] = {fast<dtensor_to_local>("dtensor_to_local"),
                                    fast<dtensor_from_local>("dtensor_from_local"),
                                    fast<redistribute_dtensor>("redistribute_dtensor"),
                                    fast<dtensor_full_tensor>("dtensor_full_tensor"),
                                    fast<wrap_dtensors>("wrap_dtensors"),
                                    fast<run_changed>("run_changed"),
                                    fast<unwrap_args>("unwrap_args"),
                                    {"is_watched", is_watched, METH_NOARGS, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module, functions) != 0) {
    throw python_error();
  }
}

}  // namespace funcol::python
