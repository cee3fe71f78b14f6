// Decisions about calls: see call_plan.h.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include "dispatch/call_plan.h"
#include "dispatch/mixed_tensors.h"
#include "dispatch/strides.h"
#include "layout/shards.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/meshes.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/specs.h"
#include "sharding/local_sizes.h"

namespace funcol::python {
namespace {

bool is_true(const py::object& object) { return object.is(py::handle(Py_True)); }

bool is_list_of_size(py::handle object, size_t size) {
  return (PyTuple_Check(object.ptr()) || PyList_Check(object.ptr())) &&
         static_cast<size_t>(PySequence_Fast_GET_SIZE(object.ptr())) == size;
}

// A call to decide.
struct UndecidedCall {
  const NativeOperators& parts;
  const Call& call;
  const torch::jit::Stack& stack;
};

// Returns true if all DTensors are on one mesh that this rank is in.
bool is_on_one_mesh(const Call& call) {
  py::object first;
  for (const auto& one : call.tensors) {
    if (one.dtensor == nullptr) {
      continue;
    }
    auto mesh = attribute<"mesh">(spec_of(one.dtensor));
    if (first && !are_equal(mesh, first)) {
      return false;
    }
    first = std::move(mesh);
  }
  return known_mesh(first).coordinate.has_value();
}

bool has_views_of_plain_tensors(const Call& call) {
  return std::ranges::any_of(call.tensors, [&](const auto& one) {
    return one.dtensor == nullptr &&
           std::ranges::any_of(call.op->views, [&](const auto& view) { return view.first == one.place; });
  });
}

// Returns true if CallPlan can run the call once it is decided.
bool can_run(const Call& call) {
  return is_on_one_mesh(call) && !(call.op->draws && call.tensors[0].dtensor == nullptr) &&
         !has_views_of_plain_tensors(call);
}

// Returns the specs of a call's tensors except wrapped numbers. Plain tensors are replicated.
std::vector<py::object> specs_of(const UndecidedCall& undecided, py::handle mesh) {
  std::vector<py::object> specs;
  for (const auto& one : undecided.call.tensors) {
    if (one.is_number) {
      continue;
    }
    if (one.dtensor != nullptr) {
      specs.push_back(py::reinterpret_borrow<py::object>(spec_of(one.dtensor)));
      continue;
    }
    specs.push_back(spec_of_plain(undecided.call.tensor(undecided.stack, one), mesh));
  }
  return specs;
}

bool has_empty_tensor(const PythonSchema& schema) {
  return std::ranges::any_of(schema.call.tensors, [](const TensorMeta& meta) {
    return std::ranges::find(meta.shape, 0) != meta.shape.end();
  });
}

using Arguments = std::vector<std::pair<size_t, c10::IValue>>;

// Returns true if the call squeezes the same dims of this rank's part, of shape `local`, as of the full
// tensor.
bool squeezes_same_dims(const OpCall& call, const std::vector<int64_t>& local) {
  const auto& shape = call.tensors[0].shape;
  std::vector<int64_t> dims(shape.size());
  if (call.has_arg("dim")) {
    dims = call.arg("dim").integers();
  } else {
    std::iota(dims.begin(), dims.end(), 0);
  }
  return std::ranges::all_of(dims, [&](int64_t dim) {
    const auto index = counted_from_0(call, dim, static_cast<int64_t>(shape.size()));
    return shape.empty() || local.at(index) != 1 || shape.at(index) == 1;
  });
}

// Returns replacements for the arguments of a decided call on `mesh` that are sizes of full tensors, such as
// the shape of a view: the sizes of this rank's parts. Returns nullopt if another operator has to run, as for
// squeeze() if this rank's part has size 1 in a dim where the full tensor does not.
//
// PyTorch counterpart: ShardingPropagator._adjust_shape_and_stride_args.
std::optional<Arguments> local_arguments(py::handle op_overload, const PythonSchema& schema,
                                         const CallDecision& decision, py::handle mesh) {
  const auto places = local_size_places(op_overload);
  if (!places) {
    return Arguments{};
  }
  if (places->shape && (decision.outputs.size() != 1 || !decision.outputs[0])) {
    return std::nullopt;
  }
  const auto& [meta, layout] =
      places->shape ? *decision.outputs[0] : Spec{schema.call.tensors[0], decision.inputs[0]};
  if (std::ranges::none_of(layout.placements, &Placement::is_shard)) {
    return Arguments{};
  }
  const auto& known = known_mesh(mesh);
  const auto local = local_shape(layout, known.mesh, meta.shape, *known.coordinate);
  if (places->shape) {
    Arguments arguments{{*places->shape, local}};
    if (places->stride) {
      arguments.emplace_back(*places->stride, dense_strides(local, meta.stride));
    }
    return arguments;
  }
  if (places->squeezed_dims) {
    return squeezes_same_dims(schema.call, local) ? std::optional(Arguments{}) : std::nullopt;
  }
  int64_t num_pixels = 1;
  for (size_t dim = 2; dim < local.size(); ++dim) {
    num_pixels *= local[dim];
  }
  const auto& numbers = places->batch_channels_pixels;
  return Arguments{{numbers[0], local.at(0)}, {numbers[1], local.at(1)}, {numbers[2], num_pixels}};
}

// Returns the output_spec of an OutputSharding with this decision.
py::object output_of(const PythonSchema& schema, const CallDecision& decision, py::handle mesh) {
  const auto& outputs = decision.outputs;
  const auto& returns = schema.op->handle.schema().returns();
  if (returns.empty() ||
      std::ranges::none_of(outputs, [](const auto& output) { return output.has_value(); })) {
    return py::none();
  }
  py::tuple specs(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    specs[i] =
        outputs[i] ? to_python_spec(*outputs[i], mesh, schema.strided_as_order, {}) : py::object(py::none());
  }
  const bool is_one = returns.size() == 1 && returns[0].real_type()->kind() == c10::TypeKind::TensorType;
  return is_one ? py::object(specs[0]) : specs;
}

// Returns the decision with Python specs for its layouts. Returns nullopt if C++ cannot carry it out.
std::optional<DecidedCall> with_specs(const Call& call, const PythonSchema& schema,
                                      const CallDecision& decision, py::handle mesh) {
  auto replaced = local_arguments(call.op->overload, schema, decision, mesh);
  const bool has_keyword_tensors =
      std::ranges::any_of(schema.keywords, [](const auto& keyword) { return !keyword.out; });
  if (!replaced || (has_keyword_tensors && (decision.moves || !replaced->empty()))) {
    return std::nullopt;
  }
  DecidedCall decided{{}, *std::move(replaced), output_of(schema, decision, mesh)};
  size_t next = 0;  // of the schema's tensors
  for (size_t number = 0; number < call.tensors.size(); ++number) {
    const auto& one = call.tensors[number];
    if (one.is_number || call.schema().arguments()[one.place].is_out()) {
      continue;
    }
    if (const auto index = next++; decision.inputs[index] != schema.layouts[index]) {
      decided.inputs.emplace_back(number, to_python_spec({schema.call.tensors[index], decision.inputs[index]},
                                                         mesh, schema.strided_as_order, {}));
    }
  }
  return decided;
}

// Decides the call in C++. Returns nullopt if the propagator has to decide, or to raise an error.
std::optional<DecidedCall> decide_in_cpp(const UndecidedCall& undecided) {
  const auto& [parts, call, stack] = undecided;
  const auto& overload = call.op->overload;
  if (parts.rules == nullptr || !parts.rules->decides(overload)) {
    return std::nullopt;
  }
  try {
    const auto mesh = attribute<"mesh">(spec_of(call.first_dtensor()));
    const auto schema =
        read_call_schema(overload, call.arguments(stack), specs_of(undecided, mesh), call.op->lists_operands);
    if (has_empty_tensor(schema)) {
      return std::nullopt;
    }
    const auto decision =
        parts.engine->decide_call(overload, schema, *parts.rules, [&](const py::object& index) {
          const auto [args, kwargs] = python_arguments(undecided.call.op->handle, undecided.stack);
          return py::object(undecided.parts.query_rule(undecided.call.op->overload, args, kwargs, index));
        });
    auto decided = decision ? with_specs(call, schema, *decision, mesh) : std::nullopt;
    if (decided) {
      count_decision(overload, "C++");
    }
    return decided;
  } catch (const py::error_already_set&) {
  } catch (const python_error&) {
    PyErr_Clear();
  } catch (const std::exception&) {  // Python raises the same error
  }
  return std::nullopt;
}

// Returns `object` as a value of the argument's type; returns nullopt if it does not have this type.
std::optional<c10::IValue> value_of(py::handle object, const c10::Argument& argument) {
  try {
    return torch::jit::toIValue(object, argument.type());
  } catch (const std::exception&) {
    PyErr_Clear();
    return std::nullopt;
  }
}

// Reads which tensors an OutputSharding redistributes, and which arguments it replaces. Returns false if
// PyTorch has to do that.
bool read_redistribution(const UndecidedCall& undecided, py::handle sharding, DecidedCall& decided) {
  const auto schema = attribute<"redistribute_schema">(sharding);
  const auto& parameters = undecided.call.schema().arguments();
  // PyTorch may have replaced the operator, as it does squeeze() by the overload that names its dims.
  if (schema.is_none() || find_attribute<"held_kwargs">(schema) ||
      !attribute<"op">(schema).is(undecided.call.op->overload)) {
    return false;
  }
  const bool takes_values = is_true(attribute<"use_val_from_redistribute_schema">(sharding));
  const auto wanted = attribute<"args_schema">(schema);
  if (!PyTuple_Check(wanted.ptr()) || py::len(wanted) > parameters.size()) {
    return false;
  }
  const auto& tensors = undecided.call.tensors;
  size_t number = 0;  // of the next tensor
  for (size_t i = 0; i < py::len(wanted); ++i) {
    const py::handle target = PyTuple_GET_ITEM(wanted.ptr(), static_cast<Py_ssize_t>(i));
    const auto& value = undecided.call.arguments(undecided.stack)[i];
    if (parameters[i].kwarg_only()) {
      return false;
    }
    const bool has_tensors = number < tensors.size() && tensors[number].place == i;
    if (has_tensors && value.isList() && !is_list_of_size(target, value.toListRef().size())) {
      return false;
    }
    for (; number < tensors.size() && tensors[number].place == i; ++number) {
      const auto index = static_cast<Py_ssize_t>(tensors[number].index);
      const py::handle spec = index < 0 ? target : py::handle(PySequence_Fast_GET_ITEM(target.ptr(), index));
      if (!tensors[number].is_number) {
        decided.inputs.emplace_back(number, py::reinterpret_borrow<py::object>(spec));
      }
    }
    if (!has_tensors && takes_values && !value.isTensor()) {
      auto taken = value_of(target, parameters[i]);
      if (!taken) {
        return false;
      }
      decided.replaced.emplace_back(i, *std::move(taken));
    }
  }
  return true;
}

std::optional<DecidedCall> decide_in_python(const UndecidedCall& undecided) {
  const auto& op = *undecided.call.op;
  const auto [args, kwargs] = python_arguments(op.handle, undecided.stack);
  const py::object sharding = undecided.parts.decide(op.overload, args, kwargs);
  if (PyExceptionInstance_Check(sharding.ptr())) {
    return DecidedCall{.error = sharding};
  }
  DecidedCall decided{.output = attribute<"output_spec">(sharding)};
  if (is_true(attribute<"needs_redistribute">(sharding)) &&
      !read_redistribution(undecided, sharding, decided)) {
    return std::nullopt;
  }
  return decided;
}

}  // namespace

std::optional<DecidedCall> decide_call(const NativeOperators& parts, const Call& call,
                                       const torch::jit::Stack& stack) {
  const UndecidedCall undecided{parts, call, stack};
  const bool runs = can_run(call);
  if (auto decided = runs ? decide_in_cpp(undecided) : std::nullopt) {
    return decided;
  }
  auto decided = decide_in_python(undecided);
  return runs || (decided && decided->error) ? decided : std::nullopt;
}

}  // namespace funcol::python
