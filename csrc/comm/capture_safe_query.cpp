#include "comm/capture_safe_query.h"

#include <atomic>

namespace funcol {
namespace {

std::atomic<bool> has_had_cuda{false};

bool never() { return false; }
IsCapturing is_capturing = never;

}  // namespace

void set_is_capturing(IsCapturing is_capturing_now) { is_capturing = is_capturing_now; }

void note_cuda_is_used() { has_had_cuda.store(true, std::memory_order_relaxed); }

AskingDevices::AskingDevices() {
  if (has_had_cuda.load(std::memory_order_relaxed)) {
    is_allowed_ = !is_capturing();
    relaxed_.emplace();
  }
}

}  // namespace funcol
