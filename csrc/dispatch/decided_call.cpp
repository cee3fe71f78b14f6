#include "dispatch/decided_call.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <exception>

#include "dispatch/local_arguments.h"
#include "dispatch/mixed_tensors.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/meshes.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/spec_objects.h"
#include "pyobjects/specs.h"

namespace funcol::python {
namespace {

bool is_true(const py::object& object) { return object.is(py::handle(Py_True)); }

bool is_list_of(py::handle object, size_t size) {
  return (PyTuple_Check(object.ptr()) || PyList_Check(object.ptr())) &&
         static_cast<size_t>(PySequence_Fast_GET_SIZE(object.ptr())) == size;
}

// A call to decide.
struct Asked {
  const NativeOperators& parts;
  const c10::OperatorHandle& op;
  const DescribedOperator& described;
  const torch::jit::Stack& stack;
  const Call& call;

  at::ArrayRef<c10::IValue> arguments() const {
    const auto count = op.schema().arguments().size();
    return at::ArrayRef<c10::IValue>(stack.data() + (stack.size() - count), count);  // NOLINT: {} is a list
  }
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

bool has_views_of_plain_tensors(const DescribedOperator& described, const Call& call) {
  return std::ranges::any_of(call.tensors, [&](const auto& one) {
    return one.dtensor == nullptr &&
           std::ranges::any_of(described.views, [&](const auto& view) { return view.first == one.place; });
  });
}

// Returns true if CallPlan can run the call, if it is decided.
bool can_run(const Asked& asked) {
  return is_on_one_mesh(asked.call) && !(asked.described.draws && asked.call.tensors[0].dtensor == nullptr) &&
         !has_views_of_plain_tensors(asked.described, asked.call);
}

// Returns the specs of a call's tensors, without numbers; plain tensors are replicated.
std::vector<py::object> specs_of(const Asked& asked, py::handle mesh) {
  std::vector<py::object> specs;
  for (const auto& one : asked.call.tensors) {
    if (one.is_number) {
      continue;
    }
    if (one.dtensor != nullptr) {
      specs.push_back(py::reinterpret_borrow<py::object>(spec_of(one.dtensor)));
      continue;
    }
    const auto& value = asked.arguments()[one.place];
    specs.push_back(
        spec_of_plain(one.index < 0 ? value.toTensor() : value.toListRef()[one.index].toTensor(), mesh));
  }
  return specs;
}

bool holds_nothing(const PythonSchema& schema) {
  return std::ranges::any_of(schema.call.tensors, [](const TensorMeta& meta) {
    return std::ranges::find(meta.shape, 0) != meta.shape.end();
  });
}

// Returns the output_spec of an OutputSharding with this decision.
py::object output_of(const Asked& asked, const PythonSchema& schema, const CallDecision& decision,
                     py::handle mesh) {
  const auto& outputs = decision.outputs;
  const auto& returns = asked.op.schema().returns();
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

// Puts the specs of a decision in its place. Returns nullopt if C++ cannot redistribute as it says.
std::optional<DecidedCall> with_specs(const Asked& asked, const PythonSchema& schema,
                                      const CallDecision& decision, py::handle mesh) {
  auto replaced = local_arguments(asked.described.overload, schema, decision, mesh);
  const bool has_keyword_tensors =
      std::ranges::any_of(schema.keywords, [](const auto& keyword) { return !keyword.out; });
  if (!replaced || (has_keyword_tensors && (decision.moves || !replaced->empty()))) {
    return std::nullopt;
  }
  DecidedCall decided{{}, *std::move(replaced), output_of(asked, schema, decision, mesh)};
  size_t next = 0;  // of the schema's tensors
  for (size_t number = 0; number < asked.call.tensors.size(); ++number) {
    const auto& one = asked.call.tensors[number];
    if (one.is_number || asked.op.schema().arguments()[one.place].is_out()) {
      continue;
    }
    if (const auto index = next++; decision.inputs[index] != schema.layouts[index]) {
      decided.inputs.emplace_back(number, to_python_spec({schema.call.tensors[index], decision.inputs[index]},
                                                         mesh, schema.strided_as_order, {}));
    }
  }
  return decided;
}

// Returns nullopt if the propagator has to decide, or has an error to raise.
std::optional<DecidedCall> decide_in_cpp(const Asked& asked) {
  const auto& [parts, op, described, stack, call] = asked;
  if (parts.rules == nullptr || !parts.rules->decides(described.overload)) {
    return std::nullopt;
  }
  try {
    const auto mesh = attribute<"mesh">(spec_of(call.first_dtensor()));
    const auto schema = read_call_schema(described.overload, asked.arguments(), specs_of(asked, mesh),
                                         described.lists_operands);
    if (holds_nothing(schema)) {
      return std::nullopt;
    }
    const auto decision =
        parts.engine->decide_call(described.overload, schema, *parts.rules, [&](const py::object& index) {
          const auto [args, kwargs] = python_arguments(asked.op, asked.stack);
          return py::object(asked.parts.ask(asked.described.overload, args, kwargs, index));
        });
    auto decided = decision ? with_specs(asked, schema, *decision, mesh) : std::nullopt;
    if (decided) {
      count_decision(described.overload, "C++");
    }
    return decided;
  } catch (const py::error_already_set&) {
  } catch (const python_error&) {
    PyErr_Clear();
  } catch (const std::exception&) {  // Python finds the same error, and raises it
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
bool read_redistribution(const Asked& asked, py::handle sharding, DecidedCall& decided) {
  const auto schema = attribute<"redistribute_schema">(sharding);
  const auto& parameters = asked.op.schema().arguments();
  // PyTorch may have rewritten the operator, as squeeze() to one that names its dims.
  if (schema.is_none() || find_attribute<"held_kwargs">(schema) ||
      !attribute<"op">(schema).is(asked.described.overload)) {
    return false;
  }
  const bool takes_values = is_true(attribute<"use_val_from_redistribute_schema">(sharding));
  const auto wanted = attribute<"args_schema">(schema);
  if (!PyTuple_Check(wanted.ptr()) || py::len(wanted) > parameters.size()) {
    return false;
  }
  const auto& tensors = asked.call.tensors;
  size_t number = 0;  // of the next tensor
  for (size_t i = 0; i < py::len(wanted); ++i) {
    const py::handle target = PyTuple_GET_ITEM(wanted.ptr(), static_cast<Py_ssize_t>(i));
    const auto& value = asked.arguments()[i];
    if (parameters[i].kwarg_only()) {
      return false;
    }
    const bool has_tensors = number < tensors.size() && tensors[number].place == i;
    if (has_tensors && value.isList() && !is_list_of(target, value.toListRef().size())) {
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

std::optional<DecidedCall> decide_in_python(const Asked& asked) {
  const auto [args, kwargs] = python_arguments(asked.op, asked.stack);
  const py::object sharding = asked.parts.decide(asked.described.overload, args, kwargs);
  if (PyExceptionInstance_Check(sharding.ptr())) {
    return DecidedCall{.error = sharding};
  }
  DecidedCall decided{.output = attribute<"output_spec">(sharding)};
  if (is_true(attribute<"needs_redistribute">(sharding)) && !read_redistribution(asked, sharding, decided)) {
    return std::nullopt;
  }
  return decided;
}

}  // namespace

std::optional<DecidedCall> decide_call(const NativeOperators& parts, const c10::OperatorHandle& op,
                                       const DescribedOperator& described, const torch::jit::Stack& stack,
                                       const Call& call) {
  const Asked asked{parts, op, described, stack, call};
  const bool runs = can_run(asked);
  if (auto decided = runs ? decide_in_cpp(asked) : std::nullopt) {
    return decided;
  }
  auto decided = decide_in_python(asked);
  return runs || (decided && decided->error) ? decided : std::nullopt;
}

}  // namespace funcol::python
