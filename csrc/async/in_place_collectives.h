// The in-place collectives that were started on one CommTensor and on its views.
//
// All of these tensors share one such object, so it does not matter through which of them a collective is
// started and through which the memory is used next:
//
//   c = CommTensor(x);  dist.all_reduce(c[0], async_op=True);  c.sum()     waits at sum()
//
// Each tensor waits for the collectives that write into its own part of the storage, and for no others, so
// that collectives on separate parts run at the same time.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "async/pending_collective.h"

namespace funcol {

// The bytes of a storage from the first to past the last element of a tensor. Tensors with gaps between their
// elements count the gaps as theirs, an empty tensor counts one byte.
struct MemoryRange {
  explicit MemoryRange(const c10::TensorImpl& tensor);
  bool overlaps(const MemoryRange& other) const noexcept;

  const c10::StorageImpl* storage;
  int64_t begin;
  int64_t end;
};

class InPlaceCollectives final : public c10::intrusive_ptr_target {
 public:
  using PendingPtr = c10::intrusive_ptr<PendingCollective>;

  // A collective that writes into `written` was started. Those that wrote there before must be settled.
  void add(const MemoryRange& written, PendingPtr collective);

  bool any_started() const noexcept { return any_started_.load(std::memory_order_acquire); }
  bool is_pending(const MemoryRange& range) const;

  // Waits for the collectives that write into `range`. Raises what the first of them that failed raised.
  void settle(const MemoryRange& range);

 private:
  struct Started {
    MemoryRange written;
    PendingPtr collective;
  };

  void forget_settled();

  std::atomic<bool> any_started_{false};
  std::atomic<size_t> num_running_{0};
  mutable std::mutex mutex_;  // nothing waits and no tensor dies while it is held
  std::vector<Started> running_;
};

}  // namespace funcol
