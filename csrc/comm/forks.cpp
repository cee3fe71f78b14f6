#include "comm/forks.h"

#include <pthread.h>

#include <atomic>

namespace funcol {
namespace {

std::atomic<uint64_t> forks{0};

// Registered as the library is loaded, before any group or tensor of it exists.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint64_t num_forks() noexcept { return forks.load(std::memory_order_relaxed); }

}  // namespace funcol
