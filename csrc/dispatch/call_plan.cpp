#include "dispatch/call_plan.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstddef>

#include "comm/call_site.h"
#include "dispatch/mixed_tensors.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/specs.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

bool is_sequence(py::handle object) { return PyTuple_Check(object.ptr()) || PyList_Check(object.ptr()); }

bool is_replicated(py::handle spec) {
  const auto placements = to_placements(attribute<"placements">(spec));
  return std::ranges::all_of(placements, [](const auto& one) { return one.is_replicate(); });
}

bool is_equal(const c10::IValue& one, const c10::IValue& other) {
  return one.tagKind() == other.tagKind() && !one.isTensor() && one == other;
}

// Gives results that are views of an argument the argument's storage, as PyTorch does: autograd checks it.
void share_memory(const Call& call, at::ArrayRef<at::Tensor> dtensors, at::ArrayRef<c10::IValue> results) {
  for (const auto& [place, number] : call.op->views) {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      if (call.tensors[i].place != place || call.tensors[i].index >= 0) {
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

// Calls function(overload, spec, args, kwargs), and replaces the arguments on the stack with its results.
void run_in_python(const Call& call, const py::object& function, py::handle spec, torch::jit::Stack& stack) {
  const auto [args, kwargs] = python_arguments(call.op->handle, stack);
  const auto found = function(call.op->overload, spec, args, kwargs);
  const auto& returns = call.schema().returns();
  torch::jit::drop(stack, call.schema().arguments().size());
  const auto results =
      returns.size() == 1 ? py::make_tuple(found) : py::tuple(py::reinterpret_borrow<py::object>(found));
  for (size_t i = 0; i < returns.size(); ++i) {
    torch::jit::push(stack, torch::jit::toIValue(results[i], returns[i].type()));
  }
}

}  // namespace

std::optional<CallPlan> CallPlan::make(const Call& call, const torch::jit::Stack& stack,
                                       const DecidedCall& decided) {
  CallPlan plan;
  for (const auto& [number, spec] : decided.inputs) {
    if (!plan.add_input(call, number, call.tensor(stack, call.tensors[number]), spec)) {
      return std::nullopt;
    }
  }
  for (const auto& [place, value] : decided.replaced) {
    if (!is_equal(value, call.arguments(stack)[place])) {
      plan.replaced_.emplace_back(place, value);
    }
  }
  return plan.add_result_specs(call, decided.output) ? std::optional(std::move(plan)) : std::nullopt;
}

bool CallPlan::add_input(const Call& call, size_t number, const at::Tensor& given, py::handle wanted) {
  if (!is_spec(wanted)) {
    return false;
  }
  const auto& tensor = call.tensors[number];
  py::object source;
  at::Tensor local = given;
  if (tensor.dtensor != nullptr) {
    source = py::reinterpret_borrow<py::object>(spec_of(tensor.dtensor));
    local = THPVariable_Unpack(local_of(tensor.dtensor));
    if (have_same_layout(source, wanted)) {
      return true;
    }
  } else {
    if (is_replicated(wanted)) {
      return true;
    }
    source = spec_of_plain(given, attribute<"mesh">(spec_of(call.first_dtensor())));
  }
  // A redistributed copy of a tensor that is written to or viewed would be independent of it: see
  // funcol.installation.view_writeback.
  if (call.op->is_aliased[tensor.place]) {
    return false;
  }
  auto move = move_between(source, wanted, local.itemsize());
  if (!move) {
    return false;
  }
  moves_.push_back({number, *std::move(move)});
  return true;
}

bool CallPlan::add_result_specs(const Call& call, py::handle spec) {
  using ResultKind = DescribedOperator::ResultKind;
  const auto results = call.op->result_kind;
  if (results == ResultKind::kNone || results == ResultKind::kNumbers) {
    return spec.is_none();
  }
  if (results == ResultKind::kFirstArgument) {
    const auto& first = call.tensors[0];
    return first.place == 0 && first.index < 0 && first.dtensor != nullptr && is_spec(spec) &&
           attribute<"placements">(spec).equal(attribute<"placements">(spec_of(first.dtensor)));
  }
  if (results == ResultKind::kOut) {
    return add_out_specs(call, spec);
  }
  const auto mesh = attribute<"mesh">(spec_of(call.first_dtensor()));
  const auto& returns = call.schema().returns();
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
    py::tuple specs;
    if (is_list) {
      specs = py::tuple(py::reinterpret_borrow<py::object>(of_result));
    } else if (!of_result.is_none()) {
      specs = py::make_tuple(of_result);
    }
    for (const auto& one : specs) {
      auto shared = is_spec(one) ? shared_spec_on(one.ptr(), mesh) : nullptr;
      if (shared == nullptr) {
        return false;
      }
      specs_.push_back(std::move(shared));
    }
    ends_.push_back(static_cast<uint32_t>(specs_.size()));
  }
  return true;
}

bool CallPlan::add_out_specs(const Call& call, py::handle spec) {
  const auto specs =
      PyTuple_Check(spec.ptr()) ? py::reinterpret_borrow<py::tuple>(spec) : py::make_tuple(spec);
  const auto& arguments = call.schema().arguments();
  for (size_t number = 0; number < call.tensors.size(); ++number) {
    const auto& one = call.tensors[number];
    if (!arguments[one.place].is_out()) {
      continue;
    }
    if (one.dtensor == nullptr || one.index >= 0 || outputs_.size() == specs.size()) {
      return false;
    }
    const py::handle of_output = specs[outputs_.size()];
    auto* const own_spec = spec_of(one.dtensor);
    auto shared = is_spec(of_output) ? shared_spec_on(of_output.ptr(), attribute<"mesh">(own_spec)) : nullptr;
    if (shared == nullptr) {
      return false;
    }
    outputs_.emplace_back(number, shared->id == id_of_spec(own_spec) ? nullptr : std::move(shared));
  }
  return outputs_.size() == specs.size() && outputs_.size() == call.schema().returns().size();
}

FastPathStatus CallPlan::run(const Call& call, const py::object& draw, torch::jit::Stack& stack) const {
  using ResultKind = DescribedOperator::ResultKind;
  const auto& op = call.op->handle;
  Tensors dtensors;  // keeps the DTensors alive, whose Python objects the call borrows
  Tensors locals;
  for (const auto& one : call.tensors) {
    if (one.dtensor != nullptr) {
      dtensors.push_back(THPVariable_Unpack(one.dtensor));
      locals.push_back(THPVariable_Unpack(local_of(one.dtensor)));
    } else {
      dtensors.push_back(call.tensor(stack, one));
      locals.push_back(dtensors.back());
    }
  }
  if (!moves_.empty() && observes_redistribution()) {
    return FastPathStatus::kObserved;
  }
  if (!std::ranges::all_of(moves_,
                           [&](const Move& one) { return one.move.execution->fits(locals[one.number]); })) {
    return FastPathStatus::kLocalShape;
  }
  // PyTorch's path finds out whether the call's mesh has ended, or is an equal one made later.
  if (!is_current()) {
    return FastPathStatus::kEndedGroup;
  }
  for (const auto& [number, move] : moves_) {
    const Label label(op.operator_name().name);
    const WithoutGil no_gil;
    locals[number] = move.run(locals[number]);
  }
  set_arguments(call, std::move(locals), stack.data() + (stack.size() - op.schema().arguments().size()));
  if (call.op->draws) {
    run_in_python(call, draw, drawn_spec(call), stack);
  } else {
    const WithoutGil no_gil;  // as PyTorch's own path calls it
    op.callBoxed(&stack);
  }
  if (call.op->result_kind == ResultKind::kFirstArgument) {
    stack.back() = std::move(dtensors[0]);
    return FastPathStatus::kHandled;
  }
  if (call.op->result_kind == ResultKind::kOut) {
    return_outputs(call, dtensors, stack.data() + (stack.size() - outputs_.size()));
    return FastPathStatus::kHandled;
  }
  auto* const results = stack.data() + (stack.size() - num_results());
  wrap_results(call, results);
  share_memory(call, dtensors, at::ArrayRef<c10::IValue>(results, num_results()));
  return FastPathStatus::kHandled;
}

bool CallPlan::is_current() const {
  return std::ranges::all_of(moves_, [](const Move& one) { return one.move.execution->is_current(); });
}

size_t CallPlan::heap_bytes() const {
  return (specs_.size() <= 1 ? 0 : specs_.capacity() * (sizeof(SharedSpecPtr) + sizeof(uint32_t))) +
         moves_.capacity() * sizeof(Move) + replaced_.capacity() * sizeof(replaced_[0]) +
         outputs_.capacity() * sizeof(outputs_[0]);
}

py::object CallPlan::drawn_spec(const Call& call) const {
  auto* const first = spec_of(call.tensors[0].dtensor);
  return num_results() == 0 || specs_of(0).empty() ? py::reinterpret_borrow<py::object>(first)
                                                   : specs_of(0)[0]->on(attribute<"mesh">(first));
}

void CallPlan::set_arguments(const Call& call, Tensors locals, c10::IValue* arguments) const {
  std::optional<c10::impl::GenericList> list;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& one = call.tensors[i];
    if (one.index < 0) {
      arguments[one.place] = std::move(locals[i]);
      continue;
    }
    const bool is_first = i == 0 || call.tensors[i - 1].place != one.place;
    if (is_first) {  // leaves the caller's list unchanged
      list = std::move(arguments[one.place]).toList().copy();
      arguments[one.place] = *list;
    }
    list->set(static_cast<size_t>(one.index), std::move(locals[i]));
  }
  for (const auto& [place, value] : replaced_) {
    arguments[place] = value;
  }
}

void CallPlan::return_outputs(const Call& call, const Tensors& dtensors, c10::IValue* results) const {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto& [number, spec] = outputs_[i];
    if (spec != nullptr) {
      auto* const dtensor = call.tensors[number].dtensor;
      set_spec(dtensor, spec->on(attribute<"mesh">(spec_of(dtensor))));
    }
    results[i] = dtensors[number];
  }
}

void CallPlan::wrap_results(const Call& call, c10::IValue* results) const {
  const auto mesh = attribute<"mesh">(spec_of(call.first_dtensor()));
  const auto wrap = [&](at::Tensor local, const SharedSpecPtr& of_result) {
    const bool requires_grad = local.requires_grad();
    return make_dtensor(std::move(local), of_result->on(mesh), of_result->geometry, requires_grad);
  };
  for (size_t i = 0; i < num_results(); ++i) {
    const auto specs = specs_of(i);
    if (!results[i].isTensor()) {
      auto list = results[i].toTensorList();
      for (size_t k = 0; k < list.size(); ++k) {
        list.set(k, wrap(list.get(k), specs.at(k)));
      }
      continue;
    }
    auto local = std::move(results[i]).toTensor();
    TORCH_CHECK(!specs.empty() || !local.defined() || local.dim() == 0, "funcol: result ", i, " of ",
                call.op->name, " on DTensors has no placements.");
    results[i] = specs.empty() || !local.defined() ? std::move(local) : wrap(std::move(local), specs[0]);
  }
}

}  // namespace funcol::python
