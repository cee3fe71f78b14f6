#include "dispatch/composites.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "async/dispatch_modes.h"
#include "dispatch/call_key.h"
#include "dispatch/composite_call.h"
#include "dispatch/dtensor_node.h"
#include "dispatch/fast_dispatch.h"
#include "dispatch/trace.h"
#include "layout/cache.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

constexpr std::array<CompositeKind, 7> kKinds{{{"linear", true, false, false},
                                               {"matmul", true, false, false},
                                               {"bmm", true, false, false},
                                               {"layer_norm", false, false, false},
                                               {"rms_norm", false, false, false},
                                               {"scaled_dot_product_attention", false, true, false},
                                               {"cross_entropy_loss", false, false, true}}};

struct Tables {
  std::unique_ptr<torch::Library> kernels;
  Cache<CallKey, CompositePtr> composites{find_table("composites")};
  uint64_t num_ids = 0;
};

Tables& tables() {
  static auto* const tables = new Tables;  // NOLINT: outlives Python
  return *tables;
}

// Returns true if no layer, autocast, inference mode, saved-tensor hook or Decomposing scope is active on
// this thread, and autograd is not excluded.
bool allows_fast_path(c10::DispatchKeySet keys) {
  return !DecomposeGuard::is_active && !has_active_layers() && !c10::InferenceMode::is_enabled() &&
         !keys.has_any(c10::autocast_dispatch_keyset) &&
         !c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset) &&
         at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

void run_as_pytorch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::impl::MaybeSetTLSOnEntryGuard guard;
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::PythonTLSSnapshot),
      stack);
}

// Adds the global settings by which attention chooses its kernel.
void add_settings(CallWords& key) {
  const auto& context = at::globalContext();
  uint64_t word = 0;
  for (const bool flag :
       {context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
        context.userEnabledCuDNNSDP(), context.deterministicAlgorithms()}) {
    word = word << 1 | (flag ? 1 : 0);
  }
  key.words.push_back(word);
}

// Returns true if a cross_entropy_loss(logits, target, weight, reduction, ignore_index, label_smoothing) is
// log_softmax and nll_loss.
bool has_classes_as_targets(at::ArrayRef<c10::IValue> arguments) {
  return at::isIntegralType(arguments[1].toTensor().scalar_type(), /*includeBool=*/false) &&
         arguments[5].toDouble() == 0;
}

// Runs the call as PyTorch does, and remembers its trace.
void run_and_trace(const CompositeKind& kind, c10::DispatchKeySet keys, const Call& call, Mask requires_grad,
                   torch::jit::Stack& stack) {
  const auto& op = call.op->handle;
  auto composite = destroyed_with_gil(std::make_unique<Composite>(
      Composite{.kind = &kind, .op = op, .id = ++tables().num_ids, .requires_grad = requires_grad}));
  for (const auto& one : call.tensors) {
    composite->places.push_back(one.place);
    composite->inputs.emplace_back(call.tensor(stack, one));
    composite->trace.add_input(call.tensor(stack, one));
  }
  {
    const Recording recording(composite->trace);
    const WithoutGil no_gil;
    const DecomposeGuard decomposing;
    run_as_pytorch(op, keys, &stack);
  }
  auto& trace = composite->trace;
  composite->result = trace.has_failed() ? kNoValue : trace.value_of(stack.back().toTensor());
  composite->falls_back = true;
  if (composite->result != kNoValue && composite->result >= composite->places.size()) {
    auto saved_values = std::make_shared<SavedValues>();
    std::vector<ValueId> outputs{composite->result};
    if (kind.is_loss && requires_grad != 0 && trace.begins_with("aten::_log_softmax")) {
      saved_values->values.push_back(static_cast<ValueId>(composite->places.size()));
      outputs.push_back(saved_values->values[0]);
    }
    saved_values->forward = trace.program(outputs);
    composite->falls_back = saved_values->forward == nullptr || saved_values->forward->moves_tensors() ||
                            trace.is_view(composite->result, composite->places.size()) ||
                            (kind.is_loss && requires_grad != 0 && saved_values->values.empty());
    composite->saved_values = std::move(saved_values);
  }
  trace.release_tensors();
  if (composite->falls_back) {
    composite->handled = trace.handled();
    trace = {};
    composite->inputs = {};
  }
  tables().composites.insert(call.key, std::move(composite));
}

void replay(const CompositePtr& composite, const Call& call, torch::jit::Stack& stack) {
  const auto num_arguments = composite->op.schema().arguments().size();
  auto* const arguments = stack.data() + (stack.size() - num_arguments);
  const auto saved_values = composite->saved_values;
  CompositeInputs inputs;
  LocalProgram::Locals locals(saved_values->forward->num_values());
  for (const auto& one : call.tensors) {
    locals[inputs.size()] = THPVariable_Unpack(local_of(one.dtensor));
    inputs.push_back(std::move(arguments[one.place]).toTensor());
    arguments[one.place] = {};
  }
  const auto mesh = attribute<"mesh">(spec_of(call.tensors[0].dtensor));
  auto outputs = saved_values->forward->run(std::move(locals));
  auto result = saved_values->forward->wrap(0, std::move(outputs[0]), mesh);
  if (composite->requires_grad != 0) {
    outputs.erase(outputs.begin());
    record_backward(composite, saved_values, std::vector<c10::IValue>(arguments, arguments + num_arguments),
                    inputs, std::move(outputs), result);
  }
  torch::jit::drop(stack, num_arguments);
  torch::jit::push(stack, std::move(result));
}

// Runs the call on the fast path. Returns false, with nothing done, if PyTorch has to run it.
bool run_fast_path(const CompositeKind& kind, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack& stack) {
  const py::gil_scoped_acquire gil;
  const auto described = supported_operator(op);
  Call call;
  if (described == nullptr || read_call(described, stack, call) != FastPathStatus::kHandled) {
    return false;
  }
  Mask requires_grad = 0;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& one = call.tensors[i];
    if (one.dtensor == nullptr || one.index >= 0) {
      return false;
    }
    const auto& tensor = call.tensor(stack, one);
    if (tensor._fw_grad(0).defined()) {
      return false;
    }
    requires_grad |= static_cast<Mask>(at::GradMode::is_enabled() && tensor.requires_grad() ? 1 : 0) << i;
  }
  if (requires_grad != 0 && !kind.is_covered(requires_grad)) {
    return false;
  }
  if (kind.is_loss && !has_classes_as_targets(call.arguments(stack))) {
    return false;
  }
  call.key.words.push_back(requires_grad);
  if (kind.is_attention) {
    add_settings(call.key);
  }
  const auto* const known = tables().composites.find(call.key);
  if (known == nullptr && !tables().composites.admits()) {
    return false;
  }
  if (known == nullptr || ((*known)->handled != nullptr && !has_handler((*known)->handled))) {
    run_and_trace(kind, keys, call, requires_grad, stack);
    return true;
  }
  const auto composite = *known;
  if (composite->falls_back || !composite->saved_values->forward->can_run({})) {
    return false;
  }
  replay(composite, call, stack);
  ++described->counts[static_cast<size_t>(FastPathStatus::kHandled)];
  return true;
}

template <size_t number>
void call_composite(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (!allows_fast_path(keys) || !run_fast_path(kKinds[number], op, keys, *stack)) {
    run_as_pytorch(op, keys, stack);
  }
}

template <size_t... numbers>
void register_kernels(torch::Library& library, std::index_sequence<numbers...> /*kinds*/) {
  (library.impl(kKinds[numbers].name, torch::CppFunction::makeFromBoxedFunction<&call_composite<numbers>>()),
   ...);
}

}  // namespace

void install_composites() {
  if (tables().kernels == nullptr) {
    tables().kernels = std::make_unique<torch::Library>(
        torch::Library::IMPL, "aten", c10::DispatchKey::PythonTLSSnapshot, __FILE__, __LINE__);
    register_kernels(*tables().kernels, std::make_index_sequence<kKinds.size()>());
  }
}

void remove_composites() { tables().kernels.reset(); }

}  // namespace funcol::python
