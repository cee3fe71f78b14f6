#include "comm/orphaned_works.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <utility>

namespace funcol {
namespace {

struct Orphan {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> buffers;
};

struct Orphanage {
  std::mutex mutex;
  std::vector<Orphan> orphans;
  std::atomic<size_t> size{0};
};

bool is_completed(c10d::Work& work) {
  try {
    return work.isCompleted();
  } catch (const std::exception&) {  // nobody is left to be told, and it will not run any further
    return true;
  }
}

// Never destroyed: at exit a Work may still be running, and nothing may block on it.
Orphanage& orphanage() {
  static auto* instance = new Orphanage();  // NOLINT(cppcoreguidelines-owning-memory)
  return *instance;
}

}  // namespace

void adopt_orphan(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers) {
  auto& home = orphanage();
  const std::lock_guard<std::mutex> lock(home.mutex);
  home.orphans.push_back({std::move(work), std::move(buffers)});
  home.size.store(home.orphans.size(), std::memory_order_relaxed);
}

size_t sweep_orphans() {
  auto& home = orphanage();
  if (home.size.load(std::memory_order_relaxed) == 0) {
    return 0;
  }
  // Asked outside the lock: a Work may be written in Python and need the GIL to answer.
  std::vector<Orphan> orphans;
  {
    const std::lock_guard<std::mutex> lock(home.mutex);
    orphans.swap(home.orphans);
  }
  std::erase_if(orphans, [](const Orphan& orphan) { return is_completed(*orphan.work); });
  const std::lock_guard<std::mutex> lock(home.mutex);
  std::move(orphans.begin(), orphans.end(), std::back_inserter(home.orphans));
  home.size.store(home.orphans.size(), std::memory_order_relaxed);
  return home.orphans.size();
}

}  // namespace funcol
