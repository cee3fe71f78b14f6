#include "async/outstanding.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/forks.h"
#include "comm/orphaned_works.h"

namespace funcol {

class UnwaitedList {
 public:
  // Never destroyed: tensors may be destroyed later than static objects.
  static UnwaitedList& instance() {
    static auto* list = new UnwaitedList();  // NOLINT(cppcoreguidelines-owning-memory)
    return *list;
  }

  void add(UnwaitedEntry& entry) {
    const std::scoped_lock lock(mutex_);
    entry.next_ = first_;
    if (first_ != nullptr) {
      first_->previous_ = &entry;
    }
    first_ = &entry;
  }

  void remove(UnwaitedEntry& entry, bool is_dropped) {
    const std::scoped_lock lock(mutex_);
    (entry.previous_ == nullptr ? first_ : entry.previous_->next_) = entry.next_;
    if (entry.next_ != nullptr) {
      entry.next_->previous_ = entry.previous_;
    }
    if (is_dropped && entry.what_.is_counted) {
      ++num_dropped_[std::string(entry.what_.op)];
    }
  }

  void forget_work(UnwaitedEntry& entry) {
    const std::scoped_lock lock(mutex_);
    entry.what_.work = nullptr;
  }

  std::map<std::string, int64_t> counts() {
    const std::scoped_lock lock(mutex_);
    auto counts = num_dropped_;
    for (const auto* entry = first_; entry != nullptr; entry = entry->next_) {
      counts[std::string(entry->what_.op)] += entry->what_.is_counted ? 1 : 0;
    }
    std::erase_if(counts, [](const auto& count) { return count.second == 0; });
    return counts;
  }

  std::vector<UnwaitedWork> works() {
    const std::scoped_lock lock(mutex_);
    std::vector<UnwaitedWork> works;
    for (const auto* entry = first_; entry != nullptr; entry = entry->next_) {
      const auto& what = entry->what_;
      if (what.work != nullptr && what.work->defined()) {
        works.push_back({entry, InFlight(what.op, *what.group, *what.outputs, entry->started_), *what.work});
      }
    }
    std::ranges::reverse(works);
    return works;
  }

 private:
  // A fork waits until no thread is inside, and the child starts anew.
  UnwaitedList() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     instance().first_ = nullptr;
                     instance().num_dropped_.clear();
                     instance().mutex_.unlock();
                   });
  }

  std::mutex mutex_;
  UnwaitedEntry* first_ = nullptr;
  std::map<std::string, int64_t> num_dropped_;
};

void UnwaitedEntry::enter(const Unwaited& collective) {
  what_ = collective;
  started_ = CallSite::now();
  is_in_ = true;
  num_forks_ = num_forks();
  UnwaitedList::instance().add(*this);
}

void UnwaitedEntry::arrive() {
  if (is_in_ && num_forks_ == num_forks()) {
    UnwaitedList::instance().forget_work(*this);
  }
}

void UnwaitedEntry::leave(bool is_dropped) {
  if (is_in_ && num_forks_ == num_forks()) {
    UnwaitedList::instance().remove(*this, is_dropped);
  }
  is_in_ = false;
}

std::vector<UnwaitedWork> unwaited_works() { return UnwaitedList::instance().works(); }

std::map<std::string, int64_t> unwaited_collectives() { return UnwaitedList::instance().counts(); }

void let_unwaited_finish(std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  auto works = unwaited_works();
  size_t num_running = ~size_t{0};
  auto last_end = Clock::now();
  while (true) {
    std::erase_if(works, [](const auto& unwaited) { return is_completed(*unwaited.work); });
    const auto num_now = works.size() + sweep_orphans();
    if (num_now == 0) {
      return;
    }
    const auto now = Clock::now();
    if (num_now < num_running) {
      num_running = num_now;
      last_end = now;
    } else if (now - last_end > patience) {
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool is_completed(c10d::Work& work) {
  try {
    return work.isCompleted();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace funcol
