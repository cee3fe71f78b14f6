// The streams on which the results of one collective are used, once it was waited for on the first of them.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace funcol {

// Makes each of them wait for the collective, and for nothing else, before its first use there: PyTorch's
// results are ordered on the stream of their first use alone. Where a CUDA graph is captured, streams outside
// are not drawn into it, nor is a collective that was waited for before.
class UsedStreams {
 public:
  // What a stream waits for, until the collective is over: its Work, which may be waited for often, or an
  // event.
  struct End {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<c10::Event> event;
  };

  // `ordered` wait for it already.
  void begin(End end, std::vector<c10::Stream> ordered);
  bool is_begun() const noexcept { return is_begun_.load(std::memory_order_acquire); }

  // `stream` waits, unless it did. Never blocks the host, as far as the Work does not.
  void order(const c10::Stream& stream);

  // Lets go of the Work if it is over. Only where devices may be asked. True if nothing is kept.
  bool let_go_if_over();

 private:
  std::mutex mutex_;
  std::atomic<bool> is_begun_{false};
  bool is_captured_ = false;
  End end_;
  std::vector<c10::Stream> ordered_;
};

}  // namespace funcol
