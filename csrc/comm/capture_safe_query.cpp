#include "comm/capture_safe_query.h"

#include <atomic>

namespace funcol {
namespace {

std::atomic<bool> cuda_is_used{false};

bool never() { return false; }
IsCapturing is_capturing = never;

}  // namespace

void set_is_capturing(IsCapturing is_capturing_now) { is_capturing = is_capturing_now; }

void note_cuda_is_used() { cuda_is_used.store(true, std::memory_order_relaxed); }

CaptureSafeQuery::CaptureSafeQuery() {
  if (cuda_is_used.load(std::memory_order_relaxed)) {
    is_allowed_ = !is_capturing();
    relaxed_.emplace();
  }
}

}  // namespace funcol
