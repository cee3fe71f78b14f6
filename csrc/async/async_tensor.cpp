#include "async/async_tensor.h"

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>

#include "async/comm_tensor.h"
#include "async/dispatch_modes.h"
#include "async/pending_collective.h"
#include "async/wake_key.h"

namespace funcol {
namespace {

thread_local int num_sharing = 0;

std::optional<torch::autograd::ViewInfo> copy_view_info(const torch::autograd::ViewInfo& info) {
  return torch::autograd::ViewInfo(info.base_, info.has_view_fn() ? info.view_fn().clone_and_set() : nullptr,
                                   info.has_view_fn() ? info.rev_view_fn() : nullptr);
}

// Moves the autograd history to `to`, in metadata of its own over the same base and node: autograd metadata
// belongs to one TensorImpl, and that of a view holds what a later in-place operator needs to rebuild it.
void move_autograd_history(const at::Tensor& from, c10::TensorImpl* to) {
  auto* old_meta = torch::autograd::impl::get_autograd_meta(from);
  if (old_meta == nullptr) {
    return;
  }
  std::unique_ptr<torch::autograd::AutogradMeta> meta;
  if (auto* view = torch::autograd::impl::get_view_autograd_meta(from)) {
    std::optional<torch::autograd::ViewInfo> backward;
    std::optional<torch::autograd::ViewInfo> forward;
    auto creation = torch::autograd::CreationMeta::DEFAULT;
    if (view->has_bw_view()) {
      backward = copy_view_info(view->get_backward_view());
      creation = view->get_creation_meta();
    }
    if (view->has_fw_view() && !view->shared_view_info()) {
      forward = copy_view_info(view->get_forward_view());
    }
    auto view_meta = std::make_unique<torch::autograd::DifferentiableViewMeta>(
        to, std::move(backward), std::move(forward), view->shared_view_info(), creation);
    if (view->has_bw_view()) {
      view_meta->set_attr_version(view->get_attr_version());
    }
    meta = std::move(view_meta);
  } else {
    meta = std::make_unique<torch::autograd::AutogradMeta>();
  }
  meta->requires_grad_ = old_meta->requires_grad_;
  meta->output_nr_ = old_meta->output_nr_;
  meta->grad_fn_ = std::move(old_meta->grad_fn_);
  meta->fw_grad_ = std::move(old_meta->fw_grad_);
  to->set_autograd_meta(std::move(meta));
}

}  // namespace

AsyncTensorImpl::SharingStorage::SharingStorage() noexcept { ++num_sharing; }
AsyncTensorImpl::SharingStorage::~SharingStorage() { --num_sharing; }

AsyncTensorImpl::Awaited::Awaited(PendingPtr collective) : collective(std::move(collective)) {}
AsyncTensorImpl::Awaited::Awaited(InPlacePtr in_place) : in_place(std::move(in_place)) {}
AsyncTensorImpl::Awaited::Awaited(const Awaited& other) = default;
AsyncTensorImpl::Awaited::Awaited(Awaited&& other) noexcept = default;
AsyncTensorImpl::Awaited::~Awaited() = default;

AsyncTensorImpl::AsyncTensorImpl(const c10::TensorImpl& source, Awaited awaited)
    : c10::TensorImpl(c10::Storage(source.unsafe_storage()), source.key_set(), source.dtype()),
      awaited_(std::move(awaited)) {}

AsyncTensorImpl::AsyncTensorImpl(ImplType kind, const c10::TensorImpl& source, Awaited awaited)
    : c10::TensorImpl(kind, c10::Storage(source.unsafe_storage()), c10::DispatchKeySet(), source.dtype()),
      awaited_(std::move(awaited)) {}

AsyncTensorImpl::~AsyncTensorImpl() = default;

at::Tensor AsyncTensorImpl::wrap(const at::Tensor& output, Awaited awaited) {
  auto* source = output.unsafeGetTensorImpl();
  auto impl = c10::make_intrusive<AsyncTensorImpl>(VIEW, *source, std::move(awaited));
  copy_tensor_metadata(source, impl.get(), source->version_counter(), source->allow_tensor_metadata_change());
  impl->key_set_ = has_wake_key() ? source->key_set().add(kWakeKey) : source->key_set();
  move_autograd_history(output, impl.get());
  return at::Tensor(std::move(impl));
}

bool AsyncTensorImpl::can_wrap(const at::Tensor& tensor) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl);
}

AsyncTensorImpl* AsyncTensorImpl::of(c10::TensorImpl* impl) {
  // A dynamic_cast to a final class, at a fraction of its cost.
  return typeid(*impl) == typeid(AsyncTensorImpl) ? static_cast<AsyncTensorImpl*>(impl) : nullptr;
}

void AsyncTensorImpl::settle() const {
  if (in_place()) {
    in_place()->settle(MemoryRange(*this));
  } else {
    pending()->settle();
    remove_wake_key(*this);
  }
}

bool AsyncTensorImpl::is_pending() const {
  return in_place() ? in_place()->is_pending(MemoryRange(*this)) : !pending()->is_settled();
}

at::Tensor AsyncTensorImpl::plain_alias() const {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(unsafe_storage()), key_set(), dtype());
  copy_tensor_metadata(this, impl.get(), version_counter(), allow_tensor_metadata_change());
  impl->set_version_counter(version_counter());
  remove_wake_key(*impl);
  return at::Tensor(std::move(impl));
}

bool AsyncTensorImpl::has_storage() const {
  if (num_sharing == 0) {
    settle();
  }
  return c10::TensorImpl::has_storage();
}

const c10::Storage& AsyncTensorImpl::storage() const {
  if (num_sharing == 0) {
    settle();
  }
  return c10::TensorImpl::storage();
}

template <typename Version>
c10::intrusive_ptr<c10::TensorImpl> AsyncTensorImpl::copy_and_detach(Version&& version_counter,
                                                                     bool allow_change) const {
  if (copies_are_pending()) {
    auto copy = c10::make_intrusive<AsyncTensorImpl>(*this, awaited_);
    copy_tensor_metadata(this, copy.get(), std::forward<Version>(version_counter), allow_change);
    return copy;
  }
  settle();
  auto copy = c10::TensorImpl::shallow_copy_and_detach(std::forward<Version>(version_counter), allow_change);
  remove_wake_key(*copy);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> AsyncTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_change) const {
  return copy_and_detach(version_counter, allow_change);
}

c10::intrusive_ptr<c10::TensorImpl> AsyncTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_change) const {
  return copy_and_detach(std::move(version_counter), allow_change);
}

// Returns true if a copy can be pending too. Returns false under dispatch modes and for subclasses with
// __torch_dispatch__: the base class shows them a detach, in which they may read values.
bool AsyncTensorImpl::copies_are_pending() const {
  return (in_place() || is_pending() || pending()->orders_streams()) && !has_watching_layers() &&
         !is_python_dispatch();
}

const char* AsyncTensorImpl::tensorimpl_type_name() const { return "funcol::AsyncTensorImpl"; }

namespace {

// Atomic access to a key set, a plain word. Other threads may read it, or clear the same bit, meanwhile.
struct KeySetAccess : c10::TensorImpl {
  static void set(const c10::TensorImpl& tensor, c10::DispatchKey key, bool present) {
    auto& keys = const_cast<c10::DispatchKeySet&>(tensor.*(&KeySetAccess::key_set_));  // NOLINT
    static_assert(std::atomic_ref<c10::DispatchKeySet>::is_always_lock_free);
    const std::atomic_ref<c10::DispatchKeySet> atomic_keys(keys);
    auto seen = atomic_keys.load(std::memory_order_relaxed);
    while (seen.has(key) != present &&
           !atomic_keys.compare_exchange_weak(seen, present ? seen.add(key) : seen.remove(key))) {
    }
  }
};

}  // namespace

void remove_wake_key(const c10::TensorImpl& tensor) { KeySetAccess::set(tensor, kWakeKey, false); }

void correct_wake_key(c10::TensorImpl& tensor) {
  const auto* impl = AsyncTensorImpl::of(&tensor);
  KeySetAccess::set(tensor, kWakeKey, has_wake_key() && impl != nullptr && impl->in_place());
}

bool is_pending(const at::Tensor& tensor) {
  if (!tensor.defined() || (has_wake_key() && !tensor.key_set().has(kWakeKey))) {
    return false;
  }
  const auto* impl = AsyncTensorImpl::of(tensor);
  return impl != nullptr && impl->is_pending();
}

void settle(const at::Tensor& tensor) {
  if (tensor.defined()) {
    if (const auto* impl = AsyncTensorImpl::of(tensor)) {
      impl->settle();
    }
  }
}

void settle(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    settle(tensor);
  }
}

}  // namespace funcol
