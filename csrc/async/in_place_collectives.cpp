#include "async/in_place_collectives.h"

#include <algorithm>
#include <utility>

#include "async/pending_collective.h"
#include "comm/extract_if.h"

namespace funcol {

MemoryRange::MemoryRange(const c10::TensorImpl& tensor)
    : storage(tensor.unsafe_storage().unsafeGetStorageImpl()),
      begin(tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize())) {
  const auto item_size = static_cast<int64_t>(tensor.itemsize());
  end = begin + 1;
  if (tensor.numel() != 0) {
    end = begin + item_size;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      end += (tensor.sizes()[dim] - 1) * tensor.strides()[dim] * item_size;
    }
  }
}

bool MemoryRange::overlaps(const MemoryRange& other) const noexcept {
  return storage == other.storage && begin < other.end && other.begin < end;
}

InPlaceCollectives::InPlaceCollectives() = default;
InPlaceCollectives::~InPlaceCollectives() = default;

void InPlaceCollectives::add(const MemoryRange& written, PendingPtr collective) {
  const std::scoped_lock lock(mutex_);
  running_.push_back({written, std::move(collective)});
  num_running_.store(running_.size(), std::memory_order_release);
  any_started_.store(true, std::memory_order_release);
}

bool InPlaceCollectives::is_pending(const MemoryRange& range) const {
  if (num_running_.load(std::memory_order_acquire) == 0) {
    return false;
  }
  const std::scoped_lock lock(mutex_);
  return std::ranges::any_of(running_, [&](const Started& started) {
    return started.written.overlaps(range) && !started.collective->is_settled();
  });
}

void InPlaceCollectives::settle(const MemoryRange& range) {
  if (num_running_.load(std::memory_order_acquire) == 0) {
    return;
  }
  std::vector<PendingPtr> awaited;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& started : running_) {
      if (started.written.overlaps(range)) {
        awaited.push_back(started.collective);
      }
    }
  }
  for (const auto& collective : awaited) {
    collective->settle();
  }
  forget_settled();
}

void InPlaceCollectives::forget_settled() {
  std::vector<Started> settled;  // destroyed after the lock is released
  const std::scoped_lock lock(mutex_);
  settled = extract_if(running_, [](const Started& started) { return started.collective->is_settled(); });
  num_running_.store(running_.size(), std::memory_order_release);
}

}  // namespace funcol
