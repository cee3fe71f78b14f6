// What happens when an operator meets a pending tensor.
//
// One boxed kernel for all operators, registered as the fallback of the wake key:
//  - an operator that PyTorch composes of others passes through; its parts come back here;
//  - a pure view makes pending tensors of the same collective, without waiting;
//  - everything else waits for its pending arguments, which makes them plain, and goes on.
#include "async/wake_fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "async/async_tensor.h"
#include "async/layers.h"
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
    // Without a tensor result its parts would not all come back: set_data, item, is_same_size.
    return std::any_of(results.begin(), results.end(), is_tensors) ? OperatorKind::kComposite
                                                                   : OperatorKind::kReader;
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
  const bool is_view = std::none_of(arguments.begin(), arguments.end(), writes) &&
                       std::all_of(results.begin(), results.end(), aliases);
  return is_view ? OperatorKind::kView : OperatorKind::kReader;
}

namespace {

template <typename Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      visit_tensors(element, visit);
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      visit_tensors(element, visit);
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      visit_tensors(entry.key(), visit);
      visit_tensors(entry.value(), visit);
    }
  }
}

class WakeHandler {
 public:
  WakeHandler(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack)
      : op_(op), keys_below_(keys & kBelow), stack_(stack) {}

  void run() {
    switch (classify(op_)) {
      case OperatorKind::kComposite:
        break;
      case OperatorKind::kView:
        // A layer may run code on the values while the view is being made.
        if (auto pending = pending_of_sole_tensor(); pending && !has_active_layers()) {
          return view(pending);
        }
        settle_arguments();
        break;
      case OperatorKind::kReader:
        settle_arguments();
        break;
    }
    op_.redispatchBoxed(keys_below_, stack_);
  }

 private:
  static constexpr c10::DispatchKeySet kBelow{c10::DispatchKeySet::FULL_AFTER, kWakeKey};

  // The collective that the viewed tensor waits for; null if it is settled, or if there are several
  // tensors, which no view of ATen has.
  AsyncTensorImpl::PendingPtr pending_of_sole_tensor() const {
    AsyncTensorImpl::PendingPtr pending;
    int num_tensors = 0;
    for (const auto& argument : arguments()) {
      visit_tensors(argument, [&](const at::Tensor& tensor) {
        ++num_tensors;
        if (auto* impl = AsyncTensorImpl::of(tensor); impl != nullptr && impl->is_pending()) {
          pending = impl->pending();
        }
      });
    }
    return num_tensors == 1 ? pending : nullptr;
  }

  void view(const AsyncTensorImpl::PendingPtr& pending) {
    {
      const AsyncTensorImpl::SharingStorage sharing;
      const c10::impl::ExcludeDispatchKeyGuard no_wake(kWakeKey);
      op_.redispatchBoxed(keys_below_, stack_);
    }
    for (auto result = stack_->end() - static_cast<int64_t>(op_.schema().returns().size());
         result != stack_->end(); ++result) {
      if (result->isTensor()) {
        *result = share_pending(result->toTensor(), pending);
      } else {
        c10::List<at::Tensor> views;
        for (const at::Tensor& tensor : result->toTensorVector()) {
          views.push_back(share_pending(tensor, pending));
        }
        *result = std::move(views);
      }
    }
  }

  static at::Tensor share_pending(const at::Tensor& view, const AsyncTensorImpl::PendingPtr& pending) {
    count_view();
    // detach and alias copy the implementation, so that their result waits already.
    return AsyncTensorImpl::of(view) != nullptr ? view : AsyncTensorImpl::wrap(view, pending);
  }

  void settle_arguments() const {
    for (const auto& argument : arguments()) {
      visit_tensors(argument, [](const at::Tensor& tensor) {
        if (!tensor.defined()) {
          return;
        }
        settle(tensor);
        // A kernel that ran with the key excluded may have copied the key to a tensor that does not wait.
        remove_wake_key(*tensor.unsafeGetTensorImpl());
      });
    }
  }

  c10::ArrayRef<c10::IValue> arguments() const {
    return torch::jit::last(*stack_, op_.schema().arguments().size());
  }

  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_below_;
  torch::jit::Stack* stack_;
};

void wake(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  WakeHandler(op, keys, stack).run();
}

bool claim_wake_key() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kWakeKey)) {
    return false;
  }
  static torch::Library library(torch::Library::IMPL, "_", kWakeKey, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&wake>());
  return true;
}

const bool owns_wake_key = claim_wake_key();

}  // namespace

bool has_wake_key() { return owns_wake_key; }

}  // namespace funcol
