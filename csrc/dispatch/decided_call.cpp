#include "dispatch/decided_call.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "dispatch/mixed_tensors.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "sharding/decision_counts.h"

namespace funcol::python {
namespace {

// Returns the specs of a call's tensors; plain tensors are replicated.
std::vector<py::object> specs_of(const Call& call, at::ArrayRef<c10::IValue> arguments) {
  const auto mesh = attribute<"mesh">(spec_of(call.first_dtensor()));
  std::vector<py::object> specs;
  for (const auto& one : call.tensors) {
    if (one.is_number) {
      continue;
    }
    if (one.dtensor != nullptr) {
      specs.push_back(py::reinterpret_borrow<py::object>(spec_of(one.dtensor)));
      continue;
    }
    const auto& value = arguments[one.place];
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

// Returns true if a tensor is a norm whose ranks' parts are not summed yet: Python moves those.
bool has_norms(const PythonSchema& schema) {
  return std::ranges::any_of(schema.layouts, [](const Layout& layout) {
    return std::ranges::any_of(layout.placements, [](const auto& one) { return one.is_norm(); });
  });
}

}  // namespace

std::optional<DecidedCall> decide_call(const NativeOperators& parts, const c10::OperatorHandle& op,
                                       const DescribedOperator& described, const torch::jit::Stack& stack,
                                       const Call& call) {
  if (parts.rules == nullptr || !parts.rules->decides(described.overload)) {
    return std::nullopt;
  }
  try {
    const auto num_arguments = op.schema().arguments().size();
    const at::ArrayRef<c10::IValue> arguments(stack.data() + (stack.size() - num_arguments), num_arguments);
    auto schema =
        read_call_schema(described.overload, arguments, specs_of(call, arguments), described.lists_operands);
    if (holds_nothing(schema) || has_norms(schema)) {
      return std::nullopt;
    }
    const auto ask = [&](const py::object& index) {
      const auto [args, kwargs] = python_arguments(op, stack);
      return py::object(parts.ask(described.overload, args, kwargs, index));
    };
    auto decision = parts.engine->decide_call(described.overload, schema, *parts.rules, ask);
    if (decision) {
      count_decision(described.overload, "C++");
      return DecidedCall{std::move(schema), *std::move(decision)};
    }
  } catch (const py::error_already_set&) {
  } catch (const python_error&) {
    PyErr_Clear();
  } catch (const std::exception&) {  // Python finds the same error, and raises it
  }
  return std::nullopt;
}

}  // namespace funcol::python
