#include "dispatch/trace.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "comm/call_site.h"
#include "dispatch/dtensor_node.h"
#include "dispatch/fast_dispatch.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/specs.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

thread_local Trace* the_trace = nullptr;

}  // namespace

bool LocalProgram::can_run(at::ArrayRef<at::Tensor> locals) const {
  return !has_handler(ops_) &&
         (!moves_tensors() ||
          (!observes_redistribution() &&
           std::ranges::all_of(input_sizes_,
                               [&](const auto& one) { return locals[one.first].sizes() == one.second; }) &&
           std::ranges::all_of(moves_, [](const Move& one) { return one.move.execution->is_current(); })));
}

LocalProgram::Locals LocalProgram::run(Locals values) const {
  const WithoutGil no_gil;
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(kBeforePython);
  torch::jit::Stack stack;
  auto argument = arguments_.begin();
  auto operand = operands_.begin();
  auto move = moves_.begin();
  auto result = results_.begin();
  for (const auto& step : steps_) {
    stack.assign(argument, argument + step.num_arguments);
    argument += step.num_arguments;
    for (const auto end = operand + step.num_operands; operand != end; ++operand) {
      auto& value = values[operand->value];
      stack[operand->place] = operand->is_last ? std::move(value) : value;
    }
    for (const auto end = move + step.num_moves; move != end; ++move) {
      const Label label(step.op.operator_name().name);
      auto& local = stack[move->place];
      local = move->move.run(local.toTensor());
    }
    step.op.callBoxed(&stack);
    for (size_t i = 0; i < step.num_results; ++i, ++result) {
      if (*result != kNoValue) {
        values[*result] = std::move(stack[i]).toTensor();
      }
    }
  }
  Locals outputs;
  for (const auto output : outputs_) {
    outputs.push_back(output == kNoValue ? at::Tensor() : values[output]);
  }
  return outputs;
}

at::Tensor LocalProgram::wrap(size_t i, at::Tensor local, py::handle mesh) const {
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(kBeforePython);
  return make_dtensor(std::move(local), specs_[i]->on(mesh), specs_[i]->geometry);
}

void Trace::add_value(const at::Tensor& tensor, Value value) {
  tensors_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                      tensor.storage().getWeakStorageImpl()});
  values_.push_back(std::move(value));
}

void Trace::add_input(const at::Tensor& tensor) {
  add_value(tensor, {nullptr, local_of(tensor).sizes().vec()});
}

void Trace::record_call(const Call& call, const CallPlanPtr& plan, const torch::jit::Stack& stack) {
  if (has_failed_) {
    return;
  }
  const auto& op = *call.op;
  if (op.result_kind != DescribedOperator::ResultKind::kNew || op.draws || op.writes) {
    return fail();
  }
  Step step{call.op, plan, call.arguments(stack).vec()};
  for (const auto& one : call.tensors) {
    if (one.index >= 0) {
      return fail();
    }
    auto& argument = step.arguments[one.place];
    step.places.push_back(static_cast<uint16_t>(one.place));
    if (one.dtensor != nullptr) {
      const auto value = value_of(argument.toTensor());
      if (value == kNoValue) {
        return fail();
      }
      step.operands.emplace_back(one.place, value);
      argument = {};
    } else if (!argument.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      return fail();
    }
  }
  steps_.push_back(std::move(step));
}

void Trace::record_results(const torch::jit::Stack& stack) {
  if (has_failed_) {
    return;
  }
  auto& step = steps_.back();
  const auto num_results = step.call->num_results();
  const auto* const results = stack.data() + (stack.size() - num_results);
  for (size_t i = 0; i < num_results; ++i) {
    const auto specs = step.call->specs_of(i);
    if (!results[i].isTensor() || (results[i].toTensor().defined() && specs.size() != 1)) {
      return fail();
    }
    if (!results[i].toTensor().defined()) {
      step.results.push_back(kNoValue);
      continue;
    }
    step.results.push_back(static_cast<ValueId>(values_.size()));
    add_value(results[i].toTensor(), {specs[0], {}});
  }
}

void Trace::repeat_first_step(const Trace& other, const at::Tensor& result) {
  TORCH_INTERNAL_ASSERT(steps_.empty());
  steps_.push_back(other.steps_[0]);
  add_value(result, other.values_[steps_[0].results[0]]);
}

bool Trace::starts_with(const Trace& other) const {
  return steps_.size() >= other.steps_.size() &&
         std::equal(other.steps_.begin(), other.steps_.end(), steps_.begin(),
                    [](const auto& one, const auto& two) {
                      return one.op->handle == two.op->handle && one.results == two.results;
                    });
}

ValueId Trace::value_of(const at::Tensor& tensor) const {
  const auto found = std::ranges::find_if(tensors_, [&](const auto& known) {
    return known.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  });
  return found == tensors_.end() ? kNoValue : static_cast<ValueId>(found - tensors_.begin());
}

bool Trace::is_view(ValueId value, size_t end) const {
  return std::any_of(tensors_.begin(), tensors_.begin() + static_cast<std::ptrdiff_t>(end),
                     [&](const auto& other) { return tensors_[value].storage == other.storage; });
}

void LocalProgram::add(const Trace::Step& step, uint64_t last) {
  const auto& call = *step.call;
  ops_.push_back(step.op);
  steps_.push_back({step.op->handle, static_cast<uint16_t>(step.arguments.size()),
                    static_cast<uint16_t>(step.operands.size()), static_cast<uint16_t>(call.moves().size()),
                    static_cast<uint16_t>(step.results.size())});
  const auto begin = arguments_.size();
  arguments_.insert(arguments_.end(), step.arguments.begin(), step.arguments.end());
  for (const auto& [place, value] : call.replaced()) {
    arguments_[begin + place] = value;
  }
  for (size_t k = 0; k < step.operands.size(); ++k) {
    operands_.push_back({step.operands[k].first, (last >> k & 1) != 0, step.operands[k].second});
  }
  for (const auto& move : call.moves()) {
    moves_.push_back({step.places[move.number], move.move});
  }
  results_.insert(results_.end(), step.results.begin(), step.results.end());
}

LocalProgramPtr Trace::program(at::ArrayRef<ValueId> outputs, size_t begin) const {
  if (has_failed_) {
    return nullptr;
  }
  const auto program = destroyed_with_gil(std::make_unique<LocalProgram>());
  std::vector<bool> is_read(values_.size());
  for (const auto output : outputs) {
    const auto spec = output == kNoValue ? nullptr : values_[output].spec;
    if (output != kNoValue && spec == nullptr) {
      return nullptr;
    }
    program->outputs_.push_back(output);
    program->specs_.push_back(spec);
    if (output != kNoValue) {
      is_read[output] = true;
    }
  }
  std::vector<bool> is_computed(values_.size());
  // Steps, each with a bit for each operand that no later step reads.
  std::vector<std::pair<const Step*, uint64_t>> needed;
  for (size_t i = steps_.size(); i-- > begin;) {
    const auto& step = steps_[i];
    const auto is_needed = [&](ValueId value) { return value != kNoValue && is_read[value]; };
    if (!step.call->moves_tensors() && std::ranges::none_of(step.results, is_needed)) {
      continue;
    }
    for (const auto result : step.results) {
      if (result != kNoValue) {
        is_computed[result] = true;
      }
    }
    uint64_t last = 0;
    for (size_t k = step.operands.size(); k-- > 0;) {
      const auto value = step.operands[k].second;
      last |= is_read[value] ? 0 : uint64_t{1} << k;
      is_read[value] = true;
    }
    needed.emplace_back(&step, last);
  }
  std::ranges::reverse(needed);
  for (const auto& [step, last] : needed) {
    program->add(*step, last);
  }
  program->num_values_ = values_.size();
  for (ValueId value = 0; value < values_.size(); ++value) {
    if (is_read[value] && !is_computed[value]) {
      program->inputs_.push_back(value);
      if (program->moves_tensors() && values_[value].spec == nullptr) {
        program->input_sizes_.emplace_back(value, values_[value].local_sizes);
      }
    }
  }
  return program;
}

size_t LocalProgram::heap_bytes() const {
  constexpr size_t kArgumentBytes = sizeof(c10::IValue) + 2 * kBlockBytes;  // with the lists among them
  return steps_.capacity() * (sizeof(Step) + sizeof(DescribedPtr)) + arguments_.capacity() * kArgumentBytes +
         operands_.capacity() * sizeof(Operand) + moves_.capacity() * sizeof(Move) +
         (results_.capacity() + outputs_.capacity() + inputs_.capacity()) * sizeof(ValueId) +
         specs_.capacity() * sizeof(SharedSpecPtr) + input_sizes_.capacity() * (sizeof input_sizes_[0] + 48) +
         8 * kBlockBytes;
}

size_t Trace::heap_bytes() const {
  constexpr size_t kStepBytes = sizeof(Step) + 4 * kBlockBytes;
  size_t bytes = steps_.capacity() * kStepBytes + values_.capacity() * (sizeof(Value) + kBlockBytes);
  for (const auto& step : steps_) {
    bytes += step.arguments.capacity() * sizeof(c10::IValue) + step.operands.capacity() * 3 * sizeof(ValueId);
  }
  return bytes;
}

Recording::Recording(Trace& trace) {
  TORCH_INTERNAL_ASSERT(the_trace == nullptr);
  the_trace = &trace;
}

Recording::~Recording() { the_trace = nullptr; }

Trace* Recording::current() { return the_trace; }

}  // namespace funcol::python
