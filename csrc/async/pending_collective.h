// A collective that was started and may still be running.
//
// Who may write to the tensors of a collective, and when
//
// A backend reads the memory that it is given until the collective is over. On every rank the input may be
// written to, with PyTorch's functional collectives and with these:
//
//   operator                                  PyTorch               funcol, and why
//   all_reduce, broadcast, reduce             after the call        after the call: it works on a copy
//   all_gather along dim 0, all_to_all,       after the first use   after the first use of the result: the
//     reduce_scatter along dim 0, permute,      of the result         input itself is read, since a copy
//     the coalesced ones along dim 0, isend                           would cost memory and time
//   all_gather along another dim (also in     after the call,       after the call: it reads a copy, and
//     redistributions, async_op=True)           which waits           does not wait
//   reduce_scatter along another dim          after the call        after the call: it packs a copy
//   split_sizes, scatter, gather,             -                     after the call
//     all_to_all of a list
//   a gradient, in the backward pass of any   after the node,       after the node: unless nothing else
//     of them, coalesced ones too               which waits           reaches its memory, a copy is read
//   _out and in-place forms                   after wait_tensor, for the input as for what is written
//
// Nothing of this depends on the device: on CUDA "after" is an order on the streams that use the tensors.
// What a collective writes is a tensor of its own until its first use, which waits, and may be written to, or
// dropped, at any time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "async/resize_guard.h"
#include "async/unwaited.h"
#include "async/used_streams.h"
#include "comm/group_ref.h"

namespace funcol {

// Shared by every tensor that waits for one collective: its outputs and all views of them.
//
// settle() waits for the Work once, however many tensors and threads ask, then runs the epilogue (the
// layout change of a gather along a dim other than 0). On CUDA, waiting makes the current stream wait,
// not the host; and the stream that the collective was started on, whose memory the buffers are, and on
// which others may use the tensors without another wait. Neither waits for what else is queued on the other.
// So does each further stream on which a result is used (used_streams.h); a view that is made after the
// first use is ordered there by whoever uses it, as any tensor. After that nothing of the collective is
// kept.
// A failure is kept instead: every settle() raises it again, so that no use ever sees the data.
// So is destroying the group before settle(): whether the data arrived first would be a matter of luck.
// If the last holder goes without having settled, Work and buffers live on until the Work is done.
//
// A collective that is over while nobody settles it lets go of its Work and its buffers by itself
// (held_memory.h). It counts as unwaited all the same.
class PendingCollective final : public c10::intrusive_ptr_target {
 public:
  struct Start {
    std::string_view op;                  // as in error messages: "all_reduce"; lives for ever
    GroupRef group;                       // for the same, and to know whether it was destroyed
    c10::intrusive_ptr<c10d::Work> work;  // null: nothing to wait for
    // Everything that the Work and the epilogue read or write. Of these the epilogue reads the last one
    // alone.
    std::vector<at::Tensor> buffers;
    std::vector<at::Tensor> outputs;  // what the caller gets
    // May be empty; runs once, after the Work, below autograd, and is given this.
    std::function<void(const Start&)> epilogue;
    bool is_counted = true;  // in unwaited_collectives(); false if another registry does that
    // PyTorch's registry has Work and tensors, until somebody waits: nothing is to be let go of here.
    bool is_kept_elsewhere = false;
  };

  explicit PendingCollective(Start&& start);
  ~PendingCollective() override;
  PendingCollective(const PendingCollective&) = delete;
  PendingCollective& operator=(const PendingCollective&) = delete;

  bool is_settled() const noexcept { return state_.load(std::memory_order_acquire) == State::kSettled; }

  // Settled, but on a device it may still run: a stream on which its outputs are used first has to wait.
  bool orders_streams() const noexcept { return used_streams_.is_begun(); }

  // Returns when the outputs hold their values (on CUDA: for work that is enqueued from now on).
  // Raises what the Work raised, extended by op, group and shape; the same on each later call. In a child
  // process, a Work of its parent that had not finished at the fork is an error as well: it never will.
  void settle();

  // Lets go of what is only needed until the Work is over, if it is. Never blocks. True if there is nothing
  // to let go of any more.
  bool let_go_if_over();

  // Waits for the Work, without telling anybody of its error yet, and lets go. On CUDA the current stream
  // waits, and what the epilogue needs stays.
  void wait_and_let_go();

  // Where letting go would never be, since the Work ends only by being waited for: has it waited for on
  // another thread, to let go then. False if it ends by itself.
  static bool wait_aside(const c10::intrusive_ptr<PendingCollective>& collective);

 private:
  enum class State : uint8_t {
    kRunning,
    kArrived,  // the outputs hold their values, but nobody has asked
    kSettled,
    kFailed
  };
  using Lock = std::unique_lock<std::mutex>;

  std::mutex& mutex() noexcept;
  bool is_in_child() const noexcept { return num_forks_at_start_ != num_forks(); }
  bool is_awaited() const noexcept { return is_awaited_ && num_forks_awaited_ == num_forks(); }
  bool is_over() const;

  bool settle_if_over(Start& finished);
  void settle_or_block(Start& finished);
  void await(Lock& lock, bool checks_group);
  void take(Start& finished);
  void let_go(Start& gone);
  void move_out(Start& gone);
  void let_go_of_buffers(std::vector<at::Tensor>& gone);

  State finish(bool checks_group);
  void wait_for_work(bool checks_group);
  void run_epilogue();
  bool is_finished_aside() const;
  void finish_aside(bool checks_group);
  void order_streams();
  void check_group_lives() const;
  [[noreturn]] void raise_destroyed() const;
  std::string describe() const;

  std::atomic<State> state_{State::kRunning};
  // Held while state changes, never while somebody waits for the Work. A fork may find it locked by a thread
  // that the child does not have: the child takes the other one.
  std::mutex mutex_;
  std::mutex mutex_in_child_;
  std::condition_variable changed_;
  bool is_awaited_ = false;  // by a thread of the process that had forked this often:
  uint64_t num_forks_awaited_ = 0;
  std::atomic<bool> is_in_epilogue_{false};
  std::exception_ptr error_;
  bool was_let_go_ = false;
  std::string described_;  // if it was let go of
  Start start_;
  ResizeGuards resize_guards_;  // of start_.outputs, which outlive them
  UnwaitedEntry unwaited_;
  uint64_t num_forks_at_start_;
  std::optional<c10::Stream> start_stream_;  // none on the CPU
  UsedStreams used_streams_;
};

// A copy of `op` that lives for ever, for ops whose names are made up at run time.
std::string_view interned(const std::string& op);

// Counts since the library was loaded.
struct AsyncCounters {
  int64_t waits = 0;  // collectives settled
  int64_t views = 0;  // views made of pending tensors without waiting
};
AsyncCounters async_counters();
void count_view();

}  // namespace funcol
