#include "dtensor/dispatcher.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "async/layers.h"
#include "dtensor/meshes.h"
#include "dtensor/redistribute_local.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/spec_objects.h"

namespace funcol::python {
namespace {

// The local tensor of `source`, redistributed to `target`. Python does it for placements with rules of their
// own, and for a local tensor of another shape than `source` gives it.
py::object moved(py::handle local, py::handle source, py::handle target) {
  LocalRedistribution how;
  how.is_lenient = true;
  try {
    if (auto result = redistribute_local(local, source, target, how)) {
      return result;
    }
  } catch (const c10::NotImplementedError&) {
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_NotImplementedError)) {
      throw;
    }
  }
  return callback(Callback::kRedistributeLocalTensor)(local, source, target);
}

// The local keyword arguments, redistributed as the schema says.
py::object moved_keywords(py::handle schema, py::object locals) {
  const auto held = find_attribute<"held_kwargs">(schema);
  if (!held) {
    return locals;
  }
  const auto wanted = attribute<"kwargs_schema">(schema).cast<py::dict>();
  py::dict given(locals.attr("copy")());
  for (const auto& [name, source] : held.cast<py::dict>()) {
    const py::object target = wanted[name];
    if (!hold_alike(source, target)) {
      given[name] = moved(given[name], source, target);
    }
  }
  return given;  // NOLINT: no move, pybind11 converts
}

// The module with which the dispatcher flattened arguments: optree where it is installed.
py::handle pytree() { return imported<"torch.distributed.tensor._dispatch", "pytree">(); }

// Returns true if the arguments of `op` have to be flattened as a tree.
bool needs_pytree(py::handle dispatcher, py::handle op) {
  const auto propagator = attribute<"sharding_propagator">(dispatcher);
  for (const auto& table : {find_attribute<"op_to_schema_info">(propagator),
                            find_attribute<"op_to_schema_info_for_single_dim_strategy">(propagator)}) {
    if (!table) {
      continue;
    }
    if (!PyDict_Check(table.ptr())) {
      return true;
    }
    auto* const info = PyDict_GetItemWithError(table.ptr(), op.ptr());
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

}  // namespace

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
  auto results = checked(is_list ? PyList_New(count) : PyTuple_New(count));
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

py::object run_changed(py::handle dispatcher, py::handle op, py::handle info, py::handle first_moved_hook) {
  const auto sharding = attribute<"output_sharding">(info);
  const auto schema = attribute<"redistribute_schema">(sharding);
  if (has_active_layers() || schema.is_none() ||
      !attribute<"needs_redistribute">(sharding).is(py::handle(Py_True)) || observes_redistribution() ||
      !known_mesh(attribute<"compute_mesh">(info)).coordinate.has_value()) {
    return {};
  }
  const auto random = PySet_Contains(attribute<"_random_ops">(dispatcher).ptr(), op.ptr());
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
    return {};
  }
  const bool takes_values = attribute<"use_val_from_redistribute_schema">(sharding).is(py::handle(Py_True));
  const auto num_held = PyList_GET_SIZE(held.ptr());
  const auto num_wanted = PyTuple_GET_SIZE(wanted.ptr());
  if (num_wanted < num_held || PyTuple_GET_SIZE(locals.ptr()) != num_held) {
    return {};
  }
  py::list given(takes_values ? num_wanted : num_held);
  bool first_moved = false;
  for (Py_ssize_t i = 0; i < static_cast<Py_ssize_t>(given.size()); ++i) {
    const py::handle target = PyTuple_GET_ITEM(wanted.ptr(), i);
    const py::handle source = i < num_held ? PyList_GET_ITEM(held.ptr(), i) : target.ptr();
    if (i < num_held && is_spec(source)) {
      const py::handle local = PyTuple_GET_ITEM(locals.ptr(), i);
      const bool stays = hold_alike(source, target);
      first_moved = first_moved || (i == 0 && !stays);
      given[i] = stays ? py::reinterpret_borrow<py::object>(local) : moved(local, source, target);
    } else {
      given[i] = takes_values ? target : source;
    }
  }
  const py::tuple arguments(structure.is_none() ? py::object(given)
                                                : pytree().attr("tree_unflatten")(given, structure));
  const auto keywords = moved_keywords(schema, attribute<"local_kwargs">(info));
  auto results = checked(PyObject_Call(attribute<"op">(schema).ptr(), arguments.ptr(), keywords.ptr()));
  if (first_moved) {
    const py::handle local = PyTuple_GET_ITEM(locals.ptr(), 0);
    const py::handle source = PyList_GET_ITEM(held.ptr(), 0);
    const py::handle target = PyTuple_GET_ITEM(wanted.ptr(), 0);
    first_moved_hook(op, local, source, given[0], target);
  }
  return results;
}

py::object unwrapped(py::handle dispatcher, py::handle op, const py::tuple& args) {
  if (needs_pytree(dispatcher, op)) {
    return {};
  }
  const auto num_args = PyTuple_GET_SIZE(args.ptr());
  py::list schema(num_args);
  py::tuple locals(num_args);
  py::object mesh;
  for (Py_ssize_t i = 0; i < num_args; ++i) {
    const py::handle argument = PyTuple_GET_ITEM(args.ptr(), i);
    if (Py_TYPE(argument.ptr()) == dtensor_type()) {
      auto spec = attribute<"_spec">(argument);
      if (!mesh) {
        mesh = attribute<"mesh">(spec);
      }
      schema[i] = std::move(spec);
      locals[i] = attribute<"_local_tensor">(argument);
    } else if (THPVariable_Check(argument.ptr()) || holds_tensors(argument.ptr())) {
      return {};
    } else {
      schema[i] = argument;
      locals[i] = argument;
    }
  }
  if (!mesh) {
    return {};
  }
  const auto op_info = imported<"torch.distributed.tensor._op_schema", "OpInfo">();
  return op_info(mesh, py::none(), schema, locals, py::dict(), py::none());
}

}  // namespace funcol::python
