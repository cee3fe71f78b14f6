#include "comm/waiter_threads.h"

#include <pthread.h>

#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/process_group.h"

namespace funcol {
namespace {

constexpr int kMaxThreads = 8;

class Waiters {
 public:
  // Never destroyed: threads may block in it while the process exits.
  static Waiters& instance() {
    static auto* const waiters = new Waiters();  // NOLINT(cppcoreguidelines-owning-memory)
    return *waiters;
  }

  void add(std::function<void()> wait) {
    const std::scoped_lock lock(mutex_);
    queue_.push_back(std::move(wait));
    if (num_threads_ < kMaxThreads) {
      ++num_threads_;
      std::thread([this] { run(); }).detach();
    }
  }

 private:
  // A fork waits for the lock. The child starts with an empty queue, and leaks what its parent waits for.
  Waiters() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     auto& child = instance();
                     new std::deque<std::function<void()>>(std::move(child.queue_));  // NOLINT
                     child.queue_.clear();
                     child.num_threads_ = 0;
                     child.mutex_.unlock();
                   });
  }

  void run() {
    while (auto wait = next()) {
      try {
        wait();
      } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to tell
      }
    }
  }

  // Returns the next call from the queue; returns an empty function if the queue is empty and the thread has
  // to end.
  std::function<void()> next() {
    const std::scoped_lock lock(mutex_);
    if (queue_.empty()) {
      --num_threads_;
      return {};
    }
    auto wait = std::move(queue_.front());
    queue_.pop_front();
    return wait;
  }

  std::mutex mutex_;
  std::deque<std::function<void()>> queue_;
  int num_threads_ = 0;
};

}  // namespace

bool ends_only_by_waiting(const c10d::Work& work, const GroupRef& ref) noexcept {
  switch (work.retrieveOpType()) {
    case c10d::OpType::UNKNOWN:    // Gloo's reduce_scatter
    case c10d::OpType::COALESCED:  // a batch of sends and receives
    case c10d::OpType::SEND:
    case c10d::OpType::RECV:
    case c10d::OpType::RECVANYSOURCE:
      break;
    default:
      return false;
  }
  try {
    const auto group = ref.lock();
    return group && group->hasBackends() && backend_name(*group, c10::kCPU) == "gloo";
  } catch (const c10::Error&) {  // no backend for the CPU, or one without a name
    return false;
  }
}

void wait_in_background(std::function<void()> wait) { Waiters::instance().add(std::move(wait)); }

}  // namespace funcol
