// A collective that was started and may still be running.
//
// Rules for writes to the tensors of a collective
//
// A backend reads its input until the collective completes. On every rank a program may write to the input:
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
// The table holds for every device: on CUDA "after" is an order on the streams that use the tensors. A
// program may write to a result, or drop it, at any time: the first use waits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "async/in_flight.h"
#include "async/resize_guard.h"
#include "async/started_collective.h"
#include "comm/forks.h"

namespace funcol {

// The streams on which the results of one collective are used, after it was waited for on the first of them.
// Each stream waits for the collective alone before it first uses a result. (PyTorch orders results on the
// stream of their first use only.) The capture of a CUDA graph includes neither streams from outside nor a
// collective that was waited for before.
class UsedStreams {
 public:
  // The end of the collective, for which a stream waits: a Work that may be waited for repeatedly, or an
  // event.
  struct End {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<c10::Event> event;
  };

  // Makes further streams wait for `end`, for which the streams `ordered` wait already.
  void begin(End end, std::vector<c10::Stream> ordered);
  bool is_begun() const noexcept { return is_begun_.load(std::memory_order_acquire); }

  // Makes `stream` wait, once. Blocks the host only if the Work does.
  void order(const c10::Stream& stream);

  // Releases the Work if it has completed. The caller has made sure that devices may be queried. Returns true
  // if nothing is kept.
  bool release_if_completed();

 private:
  std::mutex mutex_;
  std::atomic<bool> is_begun_{false};
  bool is_captured_ = false;
  End end_;
  std::vector<c10::Stream> ordered_;
};

// A started collective, shared by every tensor that waits for it: its outputs and all views of them.
//
// settle() waits for the Work once, however many tensors and threads call it, then runs the epilogue (the
// layout change of a gather along a dim other than 0). After that nothing of the collective is kept.
//
// On CUDA the host does not wait. Three kinds of streams do, each for the collective alone: the current
// stream, the stream that the collective was started on, which owns the buffers' memory, and each further
// stream on which a result is used (UsedStreams). A view that is made after the first use is an ordinary
// tensor: its user orders streams.
//
// A CUDA graph that is captured holds a collective only if it was started within the capture, and such a
// result can be waited for only there. A result that is pending when a capture begins is waited for on the
// host, at its first use within the capture.
//
// A failure is kept: every settle() raises it again, so that no use ever sees the data. A group that is
// destroyed before settle() is a failure too: whether the data arrived first would be a matter of luck. If
// the last tensor is dropped unsettled, Work and buffers live on until the Work has completed.
//
// A collective that has completed but is not settled releases its Work and its buffers by itself
// (buffer_release.h). It still counts as unwaited.
class PendingCollective final : public c10::intrusive_ptr_target {
 public:
  explicit PendingCollective(StartedCollective&& start);
  ~PendingCollective() override;
  PendingCollective(const PendingCollective&) = delete;
  PendingCollective& operator=(const PendingCollective&) = delete;

  // Removes the guards, one of which may have the last weak reference.
  void release_resources() override { resize_guards_.remove(); }

  // Returns true if the collective was started while a CUDA graph was captured on its stream.
  bool is_captured() const noexcept { return is_captured_; }

  bool is_settled() const noexcept { return state_.load(std::memory_order_acquire) == State::kSettled; }

  // Returns true if the collective is settled but may still run on a device: each further stream that uses
  // its outputs has to wait.
  bool orders_streams() const noexcept { return used_streams_.is_begun(); }

  // Waits until the outputs hold their values (on CUDA: for work that is enqueued from now on). Raises the
  // Work's error, extended by op, group and shape; the same on each later call. In a child process, a Work of
  // its parent that had not finished at the fork is an error too: it never finishes there.
  void settle();

  // Releases Work and buffers if the Work has completed. Never blocks. Returns true if nothing is left.
  bool release_if_completed();

  // Waits for the Work and releases it with the buffers; an error is kept for settle(). On CUDA the current
  // stream waits, and the Work and the epilogue's buffer are kept.
  void wait_and_release();

  // Lets another thread wait for a Work that completes only in wait(), and release it. Returns false if the
  // Work completes by itself.
  static bool wait_on_other_thread(const c10::intrusive_ptr<PendingCollective>& collective);

 private:
  enum class State : uint8_t {
    kRunning,
    kArrived,  // the outputs hold their values, but none was used
    kSettled,
    kFailed
  };
  using Lock = std::unique_lock<std::mutex>;

  std::mutex& mutex() noexcept;
  bool is_in_child() const noexcept { return num_forks_at_start_ != num_forks(); }
  bool is_running() const noexcept { return state_.load(std::memory_order_relaxed) == State::kRunning; }
  bool is_awaited() const noexcept { return is_awaited_ && num_forks_awaited_ == num_forks(); }
  bool has_completed() const;

  bool settle_if_completed(StartedCollective& finished);
  void await(Lock& lock, bool checks_group);
  void mark_settled(StartedCollective& finished);
  void release(StartedCollective& gone);
  void move_out(StartedCollective& gone);
  void release_buffers(std::vector<at::Tensor>& gone);

  State finish(bool checks_group);
  void wait_for_work(bool checks_group);
  void run_epilogue();
  bool finishes_on_side_stream() const;
  void finish_on_side_stream(bool checks_group);
  bool is_outside_capture() const;
  void finish_on_host(bool checks_group);
  void order_streams();
  [[noreturn]] void raise_ended(GroupEnd end) const;
  std::string describe() const;

  std::atomic<State> state_{State::kRunning};
  // Held while state changes, never during a wait for the Work. At a fork, a thread that the child does not
  // have may hold it: the child has a mutex of its own.
  std::mutex mutex_;
  std::mutex mutex_in_child_;
  std::condition_variable changed_;
  bool is_awaited_ = false;         // a thread waits for the Work
  uint64_t num_forks_awaited_ = 0;  // num_forks() of its process
  std::atomic<bool> is_in_epilogue_{false};
  std::exception_ptr error_;
  bool is_released_ = false;
  std::string description_;  // describe() from before the release
  StartedCollective start_;
  ResizeGuards resize_guards_;  // of start_.outputs, which outlive them
  UnwaitedEntry unwaited_;
  uint64_t num_forks_at_start_;
  std::optional<c10::Stream> start_stream_;  // none on the CPU
  bool is_captured_ = false;
  UsedStreams used_streams_;
};

int64_t total_bytes(const std::vector<at::Tensor>& tensors);

// Returns a copy of `op` that is never destroyed, for names that are composed at run time.
std::string_view interned(const std::string& op);

// Counts since the library was loaded.
struct AsyncCounters {
  int64_t waits = 0;  // collectives settled
  int64_t views = 0;  // views made of pending tensors without waiting
};
AsyncCounters async_counters();
void count_view();

}  // namespace funcol
