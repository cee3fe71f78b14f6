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

// Makes each stream wait for the collective alone before it first uses a result. (PyTorch orders results on
// the stream of their first use only.) A CUDA graph that is captured draws in neither streams from outside
// nor a collective that was waited for before.
class UsedStreams {
 public:
  // The end of the collective, for which a stream waits: a Work that may be waited for repeatedly, or an
  // event.
  struct End {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<c10::Event> event;
  };

  // The streams `ordered` wait for `end` already.
  void begin(End end, std::vector<c10::Stream> ordered);
  bool is_begun() const noexcept { return is_begun_.load(std::memory_order_acquire); }

  // Makes `stream` wait, once. Blocks the host only if the Work does.
  void order(const c10::Stream& stream);

  // Lets go of the Work if it is over. The caller has made sure that devices may be asked. True if nothing is
  // kept.
  bool let_go_if_over();

 private:
  std::mutex mutex_;
  std::atomic<bool> is_begun_{false};
  bool is_captured_ = false;
  End end_;
  std::vector<c10::Stream> ordered_;
};

}  // namespace funcol
