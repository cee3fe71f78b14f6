#include "async/stream_waits.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "comm/capture_safe_query.h"
#include "comm/gil_release.h"

namespace funcol {
namespace {

void wait_on(const c10::Stream& stream, const UsedStreams::End& end) {
  if (end.event) {
    end.event->block(stream);
  } else {
    const c10::StreamGuard on_stream(stream);
    end.work->wait();
  }
}

}  // namespace

void UsedStreams::begin(End end, std::vector<c10::Stream> ordered) {
  const bool is_captured = !AskingDevices().is_allowed();
  const std::scoped_lock lock(mutex_);
  std::swap(end_, end);  // the old one is destroyed after the lock is released
  ordered_ = std::move(ordered);
  is_captured_ = is_captured;
  is_begun_.store(true, std::memory_order_release);
}

void UsedStreams::order(const c10::Stream& stream) {
  End end;
  bool is_captured = false;
  {
    const std::scoped_lock lock(mutex_);
    if (!is_begun() || std::ranges::find(ordered_, stream) != ordered_.end()) {
      return;
    }
    end = end_;
    is_captured = is_captured_;
  }
  if (is_captured == AskingDevices().is_allowed()) {
    return;  // the capture in which it was waited for is over, or one began since
  }
  run_blocking([&] { wait_on(stream, end); });
  const std::scoped_lock lock(mutex_);
  ordered_.push_back(stream);
}

bool UsedStreams::let_go_if_over() {
  End end;
  {
    const std::scoped_lock lock(mutex_);
    end = end_;
  }
  if (is_begun() && !(end.event ? end.event->query() : end.work->isCompleted())) {
    return false;
  }
  const std::scoped_lock lock(mutex_);
  is_begun_.store(false, std::memory_order_release);
  std::swap(end_, end);
  return true;
}

}  // namespace funcol
