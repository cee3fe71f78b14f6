#include "comm/orphaned_works.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <iterator>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/capture_safe_query.h"
#include "comm/forks.h"
#include "comm/process_group.h"

namespace funcol {
namespace {

constexpr int kMaxThreads = 8;

class WaitingThreads final : public ForkSafe<WaitingThreads> {
 public:
  void add(std::function<void()> wait) {
    const std::scoped_lock lock(mutex_);
    queue_.push_back(std::move(wait));
    if (num_threads_ < kMaxThreads) {
      ++num_threads_;
      std::thread([this] { run(); }).detach();
    }
  }

 private:
  friend class ForkSafe<WaitingThreads>;

  void reset_in_child() {
    leak(queue_);
    num_threads_ = 0;
  }

  void run() {
    while (auto wait = next()) {
      try {
        wait();
      } catch (...) {  // NOLINT(bugprone-empty-catch): no caller is left to report to
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

  std::deque<std::function<void()>> queue_;
  int num_threads_ = 0;
};

struct Orphan {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> buffers;
  InFlight description;
  bool may_have_future = true;
};

// The kept Works. Some may still be running at exit, and nothing may block on them.
struct Orphanage final : ForkSafe<Orphanage> {
  std::mutex& mutex() { return mutex_; }

  void reset_in_child() {
    leak(orphans);
    leak(waited_for);
    size.store(0, std::memory_order_relaxed);
  }

  std::deque<Orphan> orphans;
  std::list<InFlight> waited_for;  // by other threads
  std::atomic<size_t> size{0};
};

// Returns true if the future of a Work written in Python has completed. Such a Work cannot override
// isCompleted(), which always returns false. Futures of backends may complete before the device, and are not
// queried.
bool has_completed_future(Orphan& orphan) {
  if (!orphan.may_have_future || !may_need_gil(*orphan.work)) {
    return false;
  }
  try {
    const auto future = orphan.work->getFuture();
    return future && future->completed();
  } catch (const std::exception&) {
    orphan.may_have_future = false;
    return false;
  }
}

bool is_orphan_completed(Orphan& orphan) {
  return is_completed(*orphan.work) || has_completed_future(orphan);
}

// Drops completed Works among the first `count`, moves the others to the end. Returns the number dropped.
size_t sweep(Orphanage& orphanage, size_t count) {
  if (orphanage.size.load(std::memory_order_relaxed) == 0) {
    return 0;
  }
  const CaptureSafeQuery query;
  if (!query.is_allowed()) {
    return 0;
  }
  // The Works are queried outside the lock: one may be written in Python and need the GIL to answer.
  std::vector<Orphan> orphans;
  {
    const std::scoped_lock lock(orphanage.mutex());
    const auto end =
        orphanage.orphans.begin() + static_cast<ptrdiff_t>(std::min(count, orphanage.orphans.size()));
    std::move(orphanage.orphans.begin(), end, std::back_inserter(orphans));
    orphanage.orphans.erase(orphanage.orphans.begin(), end);
  }
  const auto num_finished = std::erase_if(orphans, is_orphan_completed);
  const std::scoped_lock lock(orphanage.mutex());
  std::ranges::move(orphans, std::back_inserter(orphanage.orphans));
  orphanage.size.store(orphanage.orphans.size(), std::memory_order_relaxed);
  return num_finished;
}

std::list<InFlight>::iterator note_waited_for(Orphanage& orphanage, InFlight description) {
  const std::scoped_lock lock(orphanage.mutex());
  return orphanage.waited_for.insert(orphanage.waited_for.end(), std::move(description));
}

void forget_waited_for(Orphanage& orphanage, std::list<InFlight>::iterator place) {
  const std::scoped_lock lock(orphanage.mutex());
  orphanage.waited_for.erase(place);
}

}  // namespace

bool is_completed(c10d::Work& work) {
  try {
    return work.isCompleted();
  } catch (const std::exception&) {
    return true;
  }
}

bool may_need_gil(const c10d::Work& work) { return work.retrieveOpType() == c10d::OpType::UNKNOWN; }

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

void wait_in_background(std::function<void()> wait) { WaitingThreads::instance().add(std::move(wait)); }

void adopt_orphan(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers,
                  bool ends_only_by_waiting, InFlight description) {
  auto& orphanage = Orphanage::instance();
  if (ends_only_by_waiting) {
    const auto place = note_waited_for(orphanage, std::move(description));
    wait_in_background([&orphanage, place, kept = Orphan{std::move(work), std::move(buffers), {}}]() mutable {
      const auto count = c10::make_scope_exit([&] { forget_waited_for(orphanage, place); });
      const auto orphan = std::move(kept);  // destroyed before the count falls
      orphan.work->wait();
    });
    return;
  }
  if (std::ranges::any_of(buffers, [](const auto& buffer) { return buffer.defined() && buffer.is_cuda(); })) {
    note_cuda_is_used();
  }
  const std::scoped_lock lock(orphanage.mutex());
  orphanage.orphans.push_back({std::move(work), std::move(buffers), std::move(description)});
  orphanage.size.store(orphanage.orphans.size(), std::memory_order_relaxed);
}

std::vector<InFlight> kept_orphans() {
  auto& orphanage = Orphanage::instance();
  const std::scoped_lock lock(orphanage.mutex());
  std::vector<InFlight> kept(orphanage.waited_for.begin(), orphanage.waited_for.end());
  for (auto& orphan : orphanage.orphans) {
    const bool is_queried = orphan.description.is_on_cpu && !may_need_gil(*orphan.work);
    if (!is_queried || !is_orphan_completed(orphan)) {
      kept.push_back(orphan.description);
    }
  }
  return kept;
}

size_t sweep_orphans() {
  auto& orphanage = Orphanage::instance();
  sweep(orphanage, orphanage.size.load(std::memory_order_relaxed));
  const std::scoped_lock lock(orphanage.mutex());
  return orphanage.size.load(std::memory_order_relaxed) + orphanage.waited_for.size();
}

void sweep_some_orphans() {
  constexpr size_t kFew = 16;
  while (sweep(Orphanage::instance(), kFew) > 0) {
  }
}

}  // namespace funcol
