#include "async/resize_guard.h"

#include <pthread.h>

#include <mutex>
#include <typeinfo>

#include "async/pending_collective.h"

namespace funcol {
namespace {

// Returns the mutex of all chains: a storage's allocator is a chain of guards. A fork waits until no thread
// holds the mutex.
std::mutex& chains_mutex() {
  static auto* const mutex = [] {
    pthread_atfork([] { chains_mutex().lock(); }, [] { chains_mutex().unlock(); },
                   [] { chains_mutex().unlock(); });
    return new std::mutex;  // NOLINT(cppcoreguidelines-owning-memory): tensors may go while the process exits
  }();
  return *mutex;
}

}  // namespace

ResizeGuards::ResizeGuards(const std::vector<at::Tensor>& outputs, PendingCollective& collective) {
  guards_.reserve(outputs.size());  // a guard has to stay where it is
  for (const auto& output : outputs) {
    auto* const storage = output.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (storage != nullptr && storage->resizable()) {
      guards_.emplace_back(storage, &collective);
    }
  }
  if (!guards_.empty()) {
    const std::scoped_lock lock(chains_mutex());
    for (auto& guard : guards_) {
      guard.install();
    }
  }
}

void ResizeGuards::remove() {
  if (!guards_.empty()) {
    const std::scoped_lock lock(chains_mutex());
    for (auto& guard : guards_) {
      guard.remove();
    }
    guards_.clear();
  }
}

ResizeGuards::Guard* ResizeGuards::Guard::of(c10::Allocator* allocator) {
  return allocator != nullptr && typeid(*allocator) == typeid(Guard) ? static_cast<Guard*>(allocator)
                                                                     : nullptr;
}

void ResizeGuards::Guard::install() {
  below_ = storage_->allocator();
  storage_->set_allocator(this);
}

void ResizeGuards::Guard::remove() {
  unlink();
  if (has_weak_reference_) {  // never the last one: remove() is called before the collective drops its own
    has_weak_reference_ = false;
    c10::raw::weak_intrusive_ptr::decref(collective_);
  }
}

void ResizeGuards::Guard::unlink() {
  auto* above = of(storage_->allocator());
  if (above == this) {
    storage_->set_allocator(below_);
    return;
  }
  while (above != nullptr && above->below_ != this) {
    above = of(above->below_);
  }
  if (above != nullptr) {
    above->below_ = below_;
  }
}

// Keeps a weak reference until remove(): a temporary one could be the last, and destroy the collective under
// the lock.
c10::intrusive_ptr<PendingCollective> ResizeGuards::Guard::collective() {
  if (!has_weak_reference_) {
    c10::raw::weak_intrusive_ptr::incref(collective_);
    has_weak_reference_ = true;
  }
  auto weak = c10::weak_intrusive_ptr<PendingCollective>::reclaim(collective_);
  auto locked = weak.lock();
  weak.release();
  return locked;
}

// Settles the storage's collectives, then allocates. settle() removes this guard, and may destroy the
// collective. If it raises, the memory is not replaced.
c10::DataPtr ResizeGuards::Guard::allocate(size_t num_bytes) {
  auto* const storage = storage_;
  while (true) {
    c10::intrusive_ptr<PendingCollective> collective;
    {
      const std::scoped_lock lock(chains_mutex());
      auto* const guard = of(storage->allocator());
      if (guard == nullptr) {
        break;
      }
      collective = guard->collective();
    }
    if (collective) {  // else it is going, and its guard with it
      collective->settle();
    }
  }
  return storage->allocator()->allocate(num_bytes);
}

void ResizeGuards::Guard::copy_data(void* to, const void* from, size_t num_bytes) const {
  below_->copy_data(to, from, num_bytes);
}

}  // namespace funcol
