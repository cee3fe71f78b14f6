#include "dtensor/trace.h"

#include <algorithm>
#include <cstddef>

#include "dtensor/gradients.h"
#include "dtensor/native_operators.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/specs.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

thread_local Trace* the_trace = nullptr;

}  // namespace

bool Program::takes(at::ArrayRef<at::Tensor> locals) const {
  return !moves_tensors_ ||
         (!observes_redistribution() &&
          std::ranges::all_of(input_sizes_,
                              [&](const auto& one) { return locals[one.first].sizes() == one.second; }) &&
          std::ranges::all_of(steps_, [](const auto& one) { return one.step->call->is_current(); }));
}

Program::Locals Program::run(Locals values) const {
  const WithoutGil no_gil;
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(kBeforePython);
  torch::jit::Stack stack;
  for (const auto& [traced, last] : steps_) {
    const auto& step = *traced;
    stack.assign(step.arguments.begin(), step.arguments.end());
    for (size_t i = 0; i < step.operands.size(); ++i) {
      auto& value = values[step.operands[i].value];
      stack[step.operands[i].place] = (last >> i & 1) != 0 ? std::move(value) : value;
    }
    step.call->run_on_locals(step.op, step.places, stack);
    for (size_t i = 0; i < step.results.size(); ++i) {
      if (step.results[i] != kNoValue) {
        values[step.results[i]] = std::move(stack[i]).toTensor();
      }
    }
  }
  Locals outputs;
  for (const auto output : outputs_) {
    outputs.push_back(output == kNoValue ? at::Tensor() : values[output]);
  }
  return outputs;
}

at::Tensor Program::wrap(size_t i, at::Tensor local, py::handle mesh) const {
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(kBeforePython);
  return make_dtensor(std::move(local), specs_[i]->on(mesh), specs_[i]->geometry);
}

void Trace::add_input(const at::Tensor& tensor) {
  values_.push_back(tensor);
  known_.push_back({nullptr, local_of(tensor).sizes().vec()});
}

void Trace::before(const c10::OperatorHandle& op, const DescribedOperator& described, const Call& call,
                   const ServedPtr& served, const torch::jit::Stack& stack) {
  if (has_failed_) {
    return;
  }
  if (described.results != DescribedOperator::Results::kNew || described.draws || described.writes ||
      !served->runs_on_locals()) {
    return fail();
  }
  const auto num_arguments = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  TraceStep step{op, served, {stack.end() - num_arguments, stack.end()}};
  for (const auto& one : call.tensors) {
    if (one.index >= 0) {
      return fail();
    }
    auto& argument = step.arguments[one.place];
    step.places.push_back(static_cast<uint32_t>(one.place));
    if (one.dtensor != nullptr) {
      const auto value = value_of(argument.toTensor());
      if (value == kNoValue) {
        return fail();
      }
      step.operands.push_back({static_cast<uint32_t>(one.place), value});
      argument = {};
    } else if (!argument.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      return fail();
    }
  }
  steps_.push_back(std::make_shared<const TraceStep>(std::move(step)));
}

void Trace::after(const torch::jit::Stack& stack) {
  if (has_failed_) {
    return;
  }
  auto step = *steps_.back();
  const auto& specs = step.call->results();
  const auto* const results = stack.data() + (stack.size() - specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!results[i].isTensor() || (results[i].toTensor().defined() && specs[i].size() != 1)) {
      return fail();
    }
    if (!results[i].toTensor().defined()) {
      step.results.push_back(kNoValue);
      continue;
    }
    step.results.push_back(static_cast<ValueId>(values_.size()));
    values_.push_back(results[i].toTensor());
    known_.push_back({specs[i][0], {}});
  }
  steps_.back() = std::make_shared<const TraceStep>(std::move(step));
}

bool Trace::begins_as(const Trace& other) const {
  return steps_.size() >= other.steps_.size() &&
         std::equal(other.steps_.begin(), other.steps_.end(), steps_.begin(),
                    [](const auto& one, const auto& two) {
                      return one->op == two->op && one->results == two->results;
                    });
}

ValueId Trace::value_of(const at::Tensor& tensor) const {
  const auto found = std::ranges::find_if(values_, [&](const auto& value) { return value.is_same(tensor); });
  return found == values_.end() ? kNoValue : static_cast<ValueId>(found - values_.begin());
}

bool Trace::is_view(ValueId value, size_t end) const {
  return std::any_of(values_.begin(), values_.begin() + static_cast<std::ptrdiff_t>(end),
                     [&](const auto& other) { return values_[value].is_alias_of(other); });
}

void Trace::release_tensors() { values_.assign(values_.size(), at::Tensor()); }

ProgramPtr Trace::program(at::ArrayRef<ValueId> outputs, size_t begin) const {
  if (has_failed_) {
    return nullptr;
  }
  const auto program = destroyed_with_gil(std::make_unique<Program>());
  std::vector<bool> is_read(known_.size());
  for (const auto output : outputs) {
    const auto spec = output == kNoValue ? nullptr : known_[output].spec;
    if (output != kNoValue && spec == nullptr) {
      return nullptr;
    }
    program->outputs_.push_back(output);
    program->specs_.push_back(spec);
    if (output != kNoValue) {
      is_read[output] = true;
    }
  }
  std::vector<bool> is_computed(known_.size());
  for (size_t i = steps_.size(); i-- > begin;) {
    const auto& step = *steps_[i];
    const auto is_needed = [&](ValueId value) { return value != kNoValue && is_read[value]; };
    if (!step.call->moves_tensors() && std::ranges::none_of(step.results, is_needed)) {
      continue;
    }
    program->moves_tensors_ |= step.call->moves_tensors();
    for (const auto result : step.results) {
      if (result != kNoValue) {
        is_computed[result] = true;
      }
    }
    uint64_t last = 0;
    for (size_t k = step.operands.size(); k-- > 0;) {
      const auto value = step.operands[k].value;
      last |= is_read[value] ? 0 : uint64_t{1} << k;
      is_read[value] = true;
    }
    program->steps_.push_back({steps_[i], last});
  }
  std::ranges::reverse(program->steps_);
  program->num_values_ = known_.size();
  for (ValueId value = 0; value < known_.size(); ++value) {
    if (is_read[value] && !is_computed[value]) {
      program->inputs_.push_back(value);
      if (program->moves_tensors_ && known_[value].spec == nullptr) {
        program->input_sizes_.emplace_back(value, known_[value].local_sizes);
      }
    }
  }
  return program;
}

namespace {

size_t bytes_of(const TraceStepPtr& step) { return sizeof *step + 2 * kBlockBytes + step->heap_bytes(); }

}  // namespace

size_t Program::heap_bytes(bool with_steps) const {
  size_t bytes = steps_.capacity() * sizeof(Step) + outputs_.capacity() * sizeof(ValueId) +
                 specs_.capacity() * sizeof(SharedSpecPtr) + inputs_.capacity() * sizeof(ValueId) +
                 input_sizes_.capacity() * (sizeof input_sizes_[0] + 3 * kBlockBytes) + 4 * kBlockBytes;
  for (const auto& one : steps_) {
    bytes += with_steps ? bytes_of(one.step) : 0;
  }
  return bytes;
}

size_t Trace::heap_bytes() const {
  size_t bytes =
      steps_.capacity() * sizeof(TraceStepPtr) + values_.capacity() * sizeof(at::Tensor) + 3 * kBlockBytes;
  for (const auto& step : steps_) {
    bytes += bytes_of(step);
  }
  for (const auto& value : known_) {
    bytes += sizeof value + funcol::heap_bytes(value.local_sizes);
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
