#include "comm/orphaned_works.h"

#include <c10/util/ScopeExit.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <iterator>
#include <list>
#include <mutex>
#include <utility>

#include "comm/capture_safe_query.h"
#include "comm/waiter_threads.h"

namespace funcol {
namespace {

struct Orphan {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> buffers;
  InFlight what;
  bool may_have_future = true;
};

struct Orphanage {
  std::mutex mutex;
  std::deque<Orphan> orphans;
  std::list<InFlight> waited_for;  // by other threads
  std::atomic<size_t> num_waited_for{0};
  std::atomic<size_t> size{0};
};

// A Work written in Python cannot override isCompleted(), which always says no; but its future may tell.
// Works of backends name their operation. Their futures may be done before the device is, and are not asked.
bool has_completed_future(Orphan& orphan) {
  if (!orphan.may_have_future || orphan.work->retrieveOpType() != c10d::OpType::UNKNOWN) {
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
  try {
    return orphan.work->isCompleted() || has_completed_future(orphan);
  } catch (const std::exception&) {  // it will not run any further
    return true;
  }
}

// Never destroyed: at exit a Work may still be running, and nothing may block on it.
Orphanage& orphanage() {
  static auto* instance = new Orphanage();  // NOLINT(cppcoreguidelines-owning-memory)
  return *instance;
}

// A fork waits for the lock. The child starts without orphans, and leaks its parent's.
void follow_forks() {
  pthread_atfork([] { orphanage().mutex.lock(); }, [] { orphanage().mutex.unlock(); },
                 [] {
                   auto& home = orphanage();
                   new std::deque<Orphan>(std::move(home.orphans));  // NOLINT
                   home.orphans.clear();
                   new std::list<InFlight>(std::move(home.waited_for));  // NOLINT
                   home.waited_for.clear();
                   home.size.store(0, std::memory_order_relaxed);
                   home.num_waited_for.store(0, std::memory_order_relaxed);
                   home.mutex.unlock();
                 });
}

// Drops the finished Works among the first `count`, and puts the others last. Returns the number dropped.
size_t sweep(Orphanage& home, size_t count) {
  if (home.size.load(std::memory_order_relaxed) == 0) {
    return 0;
  }
  const AskingDevices asking;
  if (!asking.is_allowed()) {
    return 0;
  }
  // Asked outside the lock: a Work may be written in Python and need the GIL to answer.
  std::vector<Orphan> orphans;
  {
    const std::scoped_lock lock(home.mutex);
    const auto end = home.orphans.begin() + static_cast<ptrdiff_t>(std::min(count, home.orphans.size()));
    std::move(home.orphans.begin(), end, std::back_inserter(orphans));
    home.orphans.erase(home.orphans.begin(), end);
  }
  const auto num_finished = std::erase_if(orphans, is_orphan_completed);
  const std::scoped_lock lock(home.mutex);
  std::ranges::move(orphans, std::back_inserter(home.orphans));
  home.size.store(home.orphans.size(), std::memory_order_relaxed);
  return num_finished;
}

std::list<InFlight>::iterator note_waited_for(Orphanage& home, InFlight what) {
  const std::scoped_lock lock(home.mutex);
  home.num_waited_for.fetch_add(1, std::memory_order_relaxed);
  return home.waited_for.insert(home.waited_for.end(), std::move(what));
}

void forget_waited_for(Orphanage& home, std::list<InFlight>::iterator place) {
  const std::scoped_lock lock(home.mutex);
  home.waited_for.erase(place);
  home.num_waited_for.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

void adopt_orphan(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers,
                  bool ends_only_by_waiting, InFlight what) {
  static std::once_flag follows_forks;
  std::call_once(follows_forks, follow_forks);
  auto& home = orphanage();
  if (ends_only_by_waiting) {
    const auto place = note_waited_for(home, std::move(what));
    wait_in_background([&home, place, kept = Orphan{std::move(work), std::move(buffers), {}}]() mutable {
      const auto count = c10::make_scope_exit([&] { forget_waited_for(home, place); });
      const auto orphan = std::move(kept);  // destroyed before the count falls
      orphan.work->wait();
    });
    return;
  }
  if (std::ranges::any_of(buffers, [](const auto& buffer) { return buffer.defined() && buffer.is_cuda(); })) {
    note_cuda_is_used();
  }
  const std::scoped_lock lock(home.mutex);
  home.orphans.push_back({std::move(work), std::move(buffers), std::move(what)});
  home.size.store(home.orphans.size(), std::memory_order_relaxed);
}

std::vector<InFlight> kept_orphans() {
  auto& home = orphanage();
  const std::scoped_lock lock(home.mutex);
  std::vector<InFlight> kept(home.waited_for.begin(), home.waited_for.end());
  for (auto& orphan : home.orphans) {
    // Asks no device, and no Work that may be written in Python, which names no operation.
    const bool is_asked = orphan.what.is_on_cpu && orphan.work->retrieveOpType() != c10d::OpType::UNKNOWN;
    if (!is_asked || !is_orphan_completed(orphan)) {
      kept.push_back(orphan.what);
    }
  }
  return kept;
}

size_t sweep_orphans() {
  auto& home = orphanage();
  sweep(home, home.size.load(std::memory_order_relaxed));
  return home.size.load(std::memory_order_relaxed) + home.num_waited_for.load(std::memory_order_relaxed);
}

void sweep_some_orphans() {
  constexpr size_t kFew = 16;
  while (sweep(orphanage(), kFew) > 0) {
  }
}

}  // namespace funcol
