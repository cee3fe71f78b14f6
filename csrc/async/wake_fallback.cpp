// The fallback for operators that meet a pending tensor.
//
// One boxed kernel for all operators, registered as the fallback of the wake key:
//  - an operator that PyTorch composes of others passes through; its parts come back here;
//  - a pure view makes pending tensors of the same collective, without waiting;
//  - any other operator waits for its pending arguments, which makes them plain, and goes on. Its results are
//    CommTensors if an argument is a CommTensor on which no collective was started yet, so that collectives
//    on them are waited for, too.
#include "async/wake_fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "async/arguments.h"
#include "async/async_tensor.h"
#include "async/comm_tensor.h"
#include "async/dispatch_modes.h"
#include "async/pending_collective.h"
#include "async/wake_key.h"

namespace funcol {

OperatorKind classify(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto is_tensors = [](const c10::Argument& result) {
    const auto& type = *result.type();
    return type.kind() == c10::TypeKind::TensorType || type.isSubtypeOf(*c10::ListType::ofTensors());
  };
  const auto& results = schema.returns();
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    // The parts of an operator without a tensor result do not all come back: set_data, item, is_same_size.
    return std::ranges::any_of(results, is_tensors) ? OperatorKind::kComposite : OperatorKind::kReader;
  }
  // Only ATen's views are known to pass storage on without looking into it.
  if (results.empty() || schema.operator_name().getNamespace() != std::string_view("aten")) {
    return OperatorKind::kReader;
  }
  const auto writes = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  const auto aliases = [](const c10::Argument& result) { return result.alias_info() != nullptr; };
  const auto& arguments = schema.arguments();
  const bool is_view = std::ranges::none_of(arguments, writes) && std::ranges::all_of(results, aliases);
  return is_view ? OperatorKind::kView : OperatorKind::kReader;
}

namespace {

// Returns classify(op), remembered for ATen's operators, which are never unregistered.
OperatorKind cached_kind(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (schema.operator_name().getNamespace() != std::string_view("aten")) {
    return classify(op);
  }
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorKind> kinds;
  const auto found = kinds.find(&schema);
  return found != kinds.end() ? found->second : kinds.emplace(&schema, classify(op)).first->second;
}

class WakeHandler {
 public:
  WakeHandler(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack)
      : op_(op), keys_below_(keys & kKeysBelowWake), stack_(stack) {}

  void run() {
    switch (cached_kind(op_)) {
      case OperatorKind::kComposite:
        break;
      case OperatorKind::kView:
        // A layer, or a subclass, may run code on the values while the view is being made.
        if (const auto viewed = sole_waiting_tensor();
            viewed.defined() && !has_watching_layers() && !belongs_to_layer(viewed)) {
          return view(viewed);
        }
        return read();
      case OperatorKind::kReader:
        return read();
    }
    op_.redispatchBoxed(keys_below_, stack_);
  }

 private:
  // Returns the viewed tensor if it is pending or a CommTensor. Returns an undefined tensor otherwise, or if
  // there are several tensors: ATen's views have one.
  at::Tensor sole_waiting_tensor() const {
    at::Tensor waiting;
    int num_tensors = 0;
    for (const auto& argument : arguments_of(op_, *stack_)) {
      visit_tensors(argument, [&](const at::Tensor& tensor) {
        ++num_tensors;
        const auto* impl = AsyncTensorImpl::of(tensor);
        if (impl != nullptr && (impl->in_place() || impl->is_pending())) {
          waiting = tensor;
        }
      });
    }
    return num_tensors == 1 ? waiting : at::Tensor();
  }

  void view(const at::Tensor& viewed) {
    {
      const AsyncTensorImpl::SharingStorage sharing;
      const c10::impl::ExcludeDispatchKeyGuard no_wake(kWakeKey);
      op_.redispatchBoxed(keys_below_, stack_);
    }
    replace_results([&](const at::Tensor& view) { return share(view, viewed); });
  }

  static at::Tensor share(const at::Tensor& view, const at::Tensor& viewed) {
    if (AsyncTensorImpl::of(view) == nullptr && !AsyncTensorImpl::can_wrap(view)) {
      settle(viewed);
      return with_corrected_key(view);
    }
    // detach and alias copy the implementation: their result waits already.
    auto shared = AsyncTensorImpl::of(view) != nullptr
                      ? view
                      : AsyncTensorImpl::wrap(view, AsyncTensorImpl::of(viewed)->awaited());
    if (is_pending(shared)) {
      count_view();
    }
    return shared;
  }

  void read() {
    bool any_comm_tensor = false;
    bool any_unused = false;
    for (const auto& argument : arguments_of(op_, *stack_)) {
      visit_tensors(argument, [&](const at::Tensor& tensor) {
        settle_for_reader(tensor);
        if (is_comm_tensor(tensor)) {
          any_comm_tensor = true;
          any_unused |= !AsyncTensorImpl::of(tensor)->in_place()->any_started();
        }
      });
    }
    if (!any_comm_tensor) {
      return op_.redispatchBoxed(keys_below_, stack_);
    }
    const bool marks_results = any_unused && !has_watching_layers();
    {
      std::optional<c10::impl::ExcludeDispatchKeyGuard> no_wake;
      if (marks_results) {
        no_wake.emplace(kWakeKey);  // so that the operator's parts do not mark their results, too
      }
      op_.redispatchBoxed(keys_below_, stack_);
    }
    replace_results([&](const at::Tensor& result) {
      return marks_results ? as_comm_tensor(result) : with_corrected_key(result);
    });
  }

  template <typename Replace>
  void replace_results(const Replace& replace) {
    for (auto result = stack_->end() - static_cast<int64_t>(op_.schema().returns().size());
         result != stack_->end(); ++result) {
      *result = replace_tensors(*result, replace);
    }
  }

  // Returns `result`, of an operator on a CommTensor, as a CommTensor; unchanged if anything else refers to
  // it, such as an argument that was written.
  static at::Tensor as_comm_tensor(const at::Tensor& result) {
    if (!AsyncTensorImpl::can_wrap(result) || result.use_count() != 1 || belongs_to_layer(result)) {
      return with_corrected_key(result);
    }
    return AsyncTensorImpl::wrap(result, c10::make_intrusive<InPlaceCollectives>());
  }

  // Corrects the wake key: kernels that make a tensor over another tensor's storage copy its keys.
  static at::Tensor with_corrected_key(const at::Tensor& result) {
    if (result.defined()) {
      correct_wake_key(*result.unsafeGetTensorImpl());
    }
    return result;
  }

  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_below_;
  torch::jit::Stack* stack_;
};

bool claim_wake_key() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kWakeKey)) {
    return false;
  }
  static torch::Library library(torch::Library::IMPL, "_", kWakeKey, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&wake>());
  add_wake_kernels();
  return true;
}

const bool owns_wake_key = claim_wake_key();

}  // namespace

void wake(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  WakeHandler(op, keys, stack).run();
}

void settle_for_reader(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.key_set().has(kWakeKey)) {
    // A profile thus shows the wait apart from the operator. In settle() itself, the record would disturb a
    // profiler that records shapes: it reads the storage of tensors, and so settles, while it records an
    // operator.
    RECORD_FUNCTION("funcol::wait", c10::ArrayRef<const c10::IValue>{});
    settle(tensor);
    // A kernel that ran with the key excluded may have copied the key to a tensor that does not wait.
    correct_wake_key(*tensor.unsafeGetTensorImpl());
  }
}

bool has_wake_key() { return owns_wake_key; }

}  // namespace funcol
