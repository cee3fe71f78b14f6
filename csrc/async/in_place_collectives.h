// The in-place collectives that were started on one CommTensor and on its views.
//
// The CommTensor and its views share one such object: a collective may be started through one of them and
// the memory used through another.
//
//   c = CommTensor(x);  dist.all_reduce(c[0], async_op=True);  c.sum()     waits at sum()
//
// Each tensor waits only for the collectives that write into its own part of the storage, so that collectives
// on separate parts run at the same time.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace funcol {

class PendingCollective;

// The bytes of a storage from the first to past the last element of a tensor, gaps included. An empty tensor
// counts one byte.
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

  InPlaceCollectives();
  ~InPlaceCollectives() override;

  // Notes a new collective that writes into `written`. Earlier collectives on that range must be settled.
  void add(const MemoryRange& written, PendingPtr collective);

  bool any_started() const noexcept { return any_started_.load(std::memory_order_acquire); }
  bool is_pending(const MemoryRange& range) const;

  // Waits for the collectives that write into `range`. Raises the error of the first one that failed.
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
