#include "dtensor/served_calls.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstddef>

#include "dtensor/meshes.h"
#include "dtensor/redistribute_local.h"
#include "dtensor/spec_numbers.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/spec_objects.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

bool is_true(const py::object& object) { return object.is(py::handle(Py_True)); }

bool is_sequence(py::handle object) { return PyTuple_Check(object.ptr()) || PyList_Check(object.ptr()); }

const c10::IValue& argument(const torch::jit::Stack& stack, size_t num_arguments, size_t place) {
  return stack[stack.size() - num_arguments + place];
}

// Whether all DTensors are on one mesh, which this rank is in.
bool is_on_one_mesh(const Call& call) {
  py::object first;
  for (const auto& one : call.dtensors) {
    auto mesh = attribute<"mesh">(spec_of(one.dtensor));
    if (first && !are_equal(mesh, first)) {
      return false;
    }
    first = std::move(mesh);
  }
  return known_mesh(first).coordinate.has_value();
}

bool is_replicated(py::handle spec) {
  const auto placements = to_placements(attribute<"placements">(spec));
  return std::ranges::all_of(placements, [](const auto& one) { return one.is_replicate(); });
}

// Nothing for values that are none of the argument's type.
std::optional<c10::IValue> value_of(py::handle object, const c10::Argument& argument) {
  try {
    return torch::jit::toIValue(object, argument.type());
  } catch (const std::exception&) {
    PyErr_Clear();
    return std::nullopt;
  }
}

bool is_equal(const c10::IValue& one, const c10::IValue& other) {
  return one.tagKind() == other.tagKind() && !one.isTensor() && one == other;
}

Geometry geometry_of(py::handle spec) {
  const auto meta = attribute<"tensor_meta">(spec);
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  const bool are_numbers =
      read_ints(attribute<"shape">(meta), sizes) && read_ints(attribute<"stride">(meta), strides);
  TORCH_INTERNAL_ASSERT(are_numbers);  // a spec that has a number
  return {{sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}};
}

// Makes results that are views of an argument's memory say so, as PyTorch's do: autograd looks at it.
void share_memory(const DescribedOperator& described, const Call& call, at::ArrayRef<at::Tensor> dtensors,
                  at::ArrayRef<c10::IValue> results) {
  for (const auto& [place, number] : described.views) {
    for (size_t i = 0; i < call.dtensors.size(); ++i) {
      if (call.dtensors[i].place != place || call.dtensors[i].index >= 0) {
        continue;
      }
      const auto share = [&](const at::Tensor& result) {
        if (result.defined()) {
          result.unsafeGetTensorImpl()->set_storage_keep_dtype(dtensors[i].storage());
        }
      };
      if (results[number].isTensor()) {
        share(results[number].toTensor());
      } else {
        for (const auto& result : results[number].toListRef()) {
          share(result.toTensor());
        }
      }
    }
  }
}

}  // namespace

std::optional<ServedCall> ServedCall::make(const c10::OperatorHandle& op, const DescribedOperator& described,
                                           const torch::jit::Stack& stack, const Call& call,
                                           py::handle sharding) {
  ServedCall served;
  if (!is_on_one_mesh(call) ||
      (is_true(attribute<"needs_redistribute">(sharding)) &&
       !served.take_arguments(op, described, stack, call, sharding)) ||
      !served.take_results(op, described, call, attribute<"output_spec">(sharding))) {
    return std::nullopt;
  }
  return served;
}

bool ServedCall::take_arguments(const c10::OperatorHandle& op, const DescribedOperator& described,
                                const torch::jit::Stack& stack, const Call& call, py::handle sharding) {
  const auto schema = attribute<"redistribute_schema">(sharding);
  const auto& arguments = op.schema().arguments();
  if (schema.is_none() || find_attribute<"held_kwargs">(schema)) {
    return false;
  }
  const bool takes_values = is_true(attribute<"use_val_from_redistribute_schema">(sharding));
  const auto wanted = attribute<"args_schema">(schema);
  if (!PyTuple_Check(wanted.ptr()) || py::len(wanted) > arguments.size()) {
    return false;
  }
  size_t number = 0;  // of the next DTensor
  for (size_t i = 0; i < py::len(wanted); ++i) {
    const py::handle target = PyTuple_GET_ITEM(wanted.ptr(), static_cast<Py_ssize_t>(i));
    const auto& value = argument(stack, arguments.size(), i);
    if (arguments[i].kwarg_only()) {
      return false;
    }
    const bool has_dtensors = number < call.dtensors.size() && call.dtensors[number].place == i;
    if (has_dtensors && value.isList()) {
      if (!is_sequence(target) ||
          PySequence_Fast_GET_SIZE(target.ptr()) != static_cast<Py_ssize_t>(value.toListRef().size())) {
        return false;
      }
      for (; number < call.dtensors.size() && call.dtensors[number].place == i; ++number) {
        const auto index = static_cast<Py_ssize_t>(call.dtensors[number].index);
        if (!take_tensor(described, call, number, PySequence_Fast_GET_ITEM(target.ptr(), index))) {
          return false;
        }
      }
    } else if (has_dtensors) {
      if (!take_tensor(described, call, number++, target)) {
        return false;
      }
    } else if (value.isTensor()) {
      if (value.toTensor().defined() && !(is_spec(target) && is_replicated(target))) {
        return false;
      }
    } else if (takes_values) {
      const auto taken = value_of(target, arguments[i]);
      if (!taken.has_value()) {
        return false;
      }
      if (!is_equal(*taken, value)) {
        replaced_.emplace_back(i, *taken);
      }
    }
  }
  return true;
}

bool ServedCall::take_tensor(const DescribedOperator& described, const Call& call, size_t number,
                             py::handle wanted) {
  if (!is_spec(wanted)) {
    return false;
  }
  const auto& held = call.dtensors[number];
  auto* const source = spec_of(held.dtensor);
  if (hold_alike(source, wanted)) {
    return true;
  }
  // The copy of a tensor that is written to, or viewed, has a life of its own: see funcol.dropin.writes.
  if (described.is_aliased[held.place] || described.writes) {
    return false;
  }
  auto execution = execution_between(source, wanted, THPVariable_Unpack(local_of(held.dtensor)).itemsize());
  if (!execution) {
    return false;
  }
  moves_.push_back({number, std::move(execution)});
  return true;
}

bool ServedCall::take_results(const c10::OperatorHandle& op, const DescribedOperator& described,
                              const Call& call, py::handle spec) {
  using Results = DescribedOperator::Results;
  if (described.results == Results::kNone) {
    return spec.is_none();
  }
  if (described.results == Results::kFirstArgument) {
    const auto& first = call.dtensors[0];
    return first.place == 0 && first.index < 0 && is_spec(spec) &&
           attribute<"placements">(spec).equal(attribute<"placements">(spec_of(first.dtensor)));
  }
  const auto& returns = op.schema().returns();
  py::tuple of_results = py::make_tuple(spec);
  if (returns.size() > 1) {
    if (!is_sequence(spec)) {
      return false;
    }
    of_results = py::tuple(py::reinterpret_borrow<py::object>(spec));
  }
  if (of_results.size() != returns.size()) {
    return false;
  }
  for (size_t i = 0; i < returns.size(); ++i) {
    const py::handle of_result = of_results[i];
    const bool is_list = returns[i].real_type()->kind() == c10::TypeKind::ListType;
    if (is_list ? !is_sequence(of_result) : of_result.is_none() && returns.size() == 1) {
      return false;
    }
    auto& taken = results_.emplace_back();
    if (of_result.is_none()) {
      continue;
    }
    const py::tuple specs =
        is_list ? py::tuple(py::reinterpret_borrow<py::object>(of_result)) : py::make_tuple(of_result);
    for (const auto& one : specs) {
      if (!is_spec(one) || number_of_spec(one.ptr()) == 0) {
        return false;
      }
      taken.push_back({copy_without_mesh(one), geometry_of(one)});
    }
  }
  return true;
}

at::Tensor ServedCall::wrapped(at::Tensor local, const ResultSpec& of_result, py::handle mesh) {
  const auto spec = copy_onto(of_result.spec, mesh);
  const bool requires_grad = local.requires_grad();
  if (!requires_grad && local.layout() == at::kStrided) {
    if (auto dtensor = make_dtensor(local, spec, of_result.geometry); dtensor.defined()) {
      return dtensor;
    }
  }
  const auto object = to_python(std::move(local));
  return THPVariable_Unpack(make_dtensor(object.ptr(), spec, requires_grad).ptr());
}

Fate ServedCall::run(const c10::OperatorHandle& op, const DescribedOperator& described, const Call& call,
                     torch::jit::Stack& stack) const {
  Tensors held;  // keeps the DTensors, whose Python objects the call has borrowed
  Tensors locals;
  for (const auto& one : call.dtensors) {
    held.push_back(THPVariable_Unpack(one.dtensor));
    locals.push_back(THPVariable_Unpack(local_of(one.dtensor)));
  }
  if (!moves_.empty() && observes_redistribution()) {
    return Fate::kWatched;
  }
  if (!std::ranges::all_of(moves_,
                           [&](const Move& move) { return move.execution->fits(locals[move.number]); })) {
    return Fate::kLocalShape;
  }
  for (const auto& move : moves_) {
    const WithoutGil no_gil;
    locals[move.number] = move.execution->run(locals[move.number], /*async_op=*/false);
  }
  put_arguments(call, std::move(locals), stack.data() + (stack.size() - op.schema().arguments().size()));
  op.callBoxed(&stack);
  if (described.results == DescribedOperator::Results::kFirstArgument) {
    stack.back() = std::move(held[0]);
    return Fate::kServed;
  }
  auto* const results = stack.data() + (stack.size() - results_.size());
  wrap_results(op, attribute<"mesh">(spec_of(call.dtensors[0].dtensor)), results);
  share_memory(described, call, held, at::ArrayRef<c10::IValue>(results, results_.size()));
  return Fate::kServed;
}

void ServedCall::put_arguments(const Call& call, Tensors locals, c10::IValue* arguments) const {
  for (size_t i = 0; i < call.dtensors.size(); ++i) {
    const auto& one = call.dtensors[i];
    if (one.index < 0) {
      arguments[one.place] = std::move(locals[i]);
      continue;
    }
    const bool is_first = i == 0 || call.dtensors[i - 1].place != one.place;
    if (is_first) {  // the caller's list stays as it is
      arguments[one.place] = arguments[one.place].toList().copy();
    }
    arguments[one.place].toList().set(static_cast<size_t>(one.index), std::move(locals[i]));
  }
  for (const auto& [place, value] : replaced_) {
    arguments[place] = value;
  }
}

void ServedCall::wrap_results(const c10::OperatorHandle& op, py::handle mesh, c10::IValue* results) const {
  for (size_t i = 0; i < results_.size(); ++i) {
    const auto& specs = results_[i];
    if (!results[i].isTensor()) {
      auto list = results[i].toTensorList();
      for (size_t k = 0; k < list.size(); ++k) {
        list.set(k, wrapped(list.get(k), specs.at(k), mesh));
      }
      continue;
    }
    auto local = std::move(results[i]).toTensor();
    TORCH_CHECK(!specs.empty() || !local.defined() || local.dim() == 0, "funcol: result ", i, " of ",
                op.operator_name(), " on DTensors has no placements.");
    results[i] =
        specs.empty() || !local.defined() ? std::move(local) : wrapped(std::move(local), specs[0], mesh);
  }
}

}  // namespace funcol::python
