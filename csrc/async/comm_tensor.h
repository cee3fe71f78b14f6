// CommTensor: a tensor that waits by itself for c10d's in-place collectives on it.
//
//   c = comm_tensor(x);  dist.all_reduce(c, async_op=True);  c + 1     waits at the addition
//
// Before the first collective, a CommTensor behaves like a plain tensor, and operators on it return
// CommTensors. From the first collective on, the tensor and its views wait at their first use, like the
// results of funcol's own collectives, and operators return plain tensors. Further collectives may be started
// on it at any time.
//
// The collectives are c10d's dispatcher ops allreduce_, allgather_, _allgather_base_, reduce_scatter_,
// _reduce_scatter_base_, alltoall_, broadcast_, scatter_. They write their first argument, and CommTensors in
// it wait. Other tensors of the same memory, such as x above, do not wait.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "async/started_collective.h"

namespace funcol {

class PendingCollective;

// Returns a CommTensor with the storage, metadata and version counter of `tensor`, a view of it to autograd;
// `tensor` itself if it is a CommTensor already. Waits first if `tensor` is pending. Raises TypeError for a
// tensor without strided storage of its own: sparse, or a subclass with __torch_dispatch__.
at::Tensor comm_tensor(const at::Tensor& tensor);

// Returns false for an undefined tensor.
bool is_comm_tensor(const at::Tensor& tensor);

// Makes the CommTensors `written` wait for a collective that writes them. Earlier collectives on their memory
// must be settled.
void wait_in_place(at::TensorList written, StartedCollective collective);

// The bytes of a storage from the first to past the last element of a tensor, gaps included. An empty tensor
// counts one byte.
struct MemoryRange {
  explicit MemoryRange(const c10::TensorImpl& tensor);
  bool overlaps(const MemoryRange& other) const noexcept;

  const c10::StorageImpl* storage;
  int64_t begin;
  int64_t end;
};

// The in-place collectives that were started on one CommTensor and on its views, which share this object: a
// collective may be started through one of them and the memory used through another.
//
//   c = CommTensor(x);  dist.all_reduce(c[0], async_op=True);  c.sum()     waits at sum()
//
// Each tensor waits only for the collectives that write into its own part of the storage, so that collectives
// on separate parts run at the same time.
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
  struct RunningCollective {
    MemoryRange written;
    PendingPtr collective;
  };

  void forget_settled();

  std::atomic<bool> any_started_{false};
  std::atomic<size_t> num_running_{0};
  mutable std::mutex mutex_;  // nothing waits and no tensor dies while it is held
  std::vector<RunningCollective> running_;
};

}  // namespace funcol
