// A collective that was started and may still be running.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
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
#include "comm/group_ref.h"

namespace funcol {

// Shared by every tensor that waits for one collective: its outputs and all views of them.
//
// settle() waits for the Work once, however many tensors and threads ask, then runs the epilogue (the
// layout change of a gather along a dim other than 0). On CUDA, waiting makes the current stream wait,
// not the host; and the stream that the collective was started on, whose memory the buffers are, and on
// which others may use the tensors without another wait. After that nothing of the collective is kept.
// A failure is kept instead: every settle() raises it again, so that no use ever sees the data.
// So is destroying the group before settle(): whether the data arrived first would be a matter of luck.
// If the last holder goes without having settled, Work and buffers live on until the Work is done.
class PendingCollective final : public c10::intrusive_ptr_target {
 public:
  struct Start {
    std::string_view op;                  // as in error messages: "all_reduce"; lives for ever
    GroupRef group;                       // for the same, and to know whether it was destroyed
    c10::intrusive_ptr<c10d::Work> work;  // null: nothing to wait for
    std::vector<at::Tensor> buffers;      // everything that the Work and the epilogue read or write
    std::vector<at::Tensor> outputs;      // what the caller gets
    // May be empty; runs once, after the Work, below autograd, and is given this.
    std::function<void(const Start&)> epilogue;
    bool is_counted = true;  // in unwaited_collectives(); false if another registry does that
  };

  explicit PendingCollective(Start&& start);
  ~PendingCollective() override;
  PendingCollective(const PendingCollective&) = delete;
  PendingCollective& operator=(const PendingCollective&) = delete;

  bool is_settled() const noexcept { return state_.load(std::memory_order_acquire) == State::kSettled; }

  // Returns when the outputs hold their values (on CUDA: for work that is enqueued from now on).
  // Raises what the Work raised, extended by op, group and shape; the same on each later call. In a child
  // process, a Work of its parent that had not finished at the fork is an error as well: it never will.
  void settle();

 private:
  enum class State : uint8_t { kRunning, kSettled, kFailed };

  void finish_once(Start& finished);
  bool finish_if_over(Start& finished);
  bool is_over() const;
  State finish();
  void wait_for_work();
  void order_start_stream() const;
  std::string describe() const;

  std::atomic<State> state_{State::kRunning};
  std::mutex mutex_;
  std::exception_ptr error_;
  Start start_;
  ResizeGuards resize_guards_;  // of start_.outputs, which outlive them
  UnwaitedEntry unwaited_;
  uint64_t num_forks_at_start_;
  std::optional<c10::Stream> start_stream_;  // none on the CPU
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
