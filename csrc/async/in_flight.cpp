#include "async/in_flight.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <iomanip>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "comm/capture_safe_query.h"
#include "comm/forks.h"
#include "comm/orphaned_works.h"

namespace funcol {

namespace {

using Work = c10d::Work;

// An entry of the list of unwaited collectives, and its Work.
struct UnwaitedWork {
  const UnwaitedEntry* entry;
  InFlight description;
  c10::intrusive_ptr<Work> work;
};

}  // namespace

class UnwaitedList final : public ForkSafe<UnwaitedList> {
 public:
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
    if (is_dropped && entry.collective_->is_counted) {
      ++num_dropped_[std::string(entry.collective_->op)];
    }
  }

  void note_arrival(UnwaitedEntry& entry) {
    const std::scoped_lock lock(mutex_);
    entry.has_arrived_ = true;
  }

  std::map<std::string, int64_t> counts() {
    const std::scoped_lock lock(mutex_);
    auto counts = num_dropped_;
    for (const auto* entry = first_; entry != nullptr; entry = entry->next_) {
      counts[std::string(entry->collective_->op)] += entry->collective_->is_counted ? 1 : 0;
    }
    std::erase_if(counts, [](const auto& count) { return count.second == 0; });
    return counts;
  }

  // Returns the collectives whose Work is not known to have completed, the oldest first.
  std::vector<UnwaitedWork> works() {
    const std::scoped_lock lock(mutex_);
    std::vector<UnwaitedWork> works;
    for (const auto* entry = first_; entry != nullptr; entry = entry->next_) {
      const auto& start = *entry->collective_;
      if (!entry->has_arrived_ && start.work) {
        works.push_back({entry, InFlight(start.op, start.group, start.outputs, entry->started_), start.work});
      }
    }
    std::ranges::reverse(works);
    return works;
  }

 private:
  friend class ForkSafe<UnwaitedList>;
  void reset_in_child() {
    first_ = nullptr;
    num_dropped_.clear();
  }

  UnwaitedEntry* first_ = nullptr;
  std::map<std::string, int64_t> num_dropped_;
};

void UnwaitedEntry::enter(const StartedCollective& collective) {
  collective_ = &collective;
  started_ = CallSite::now();
  num_forks_ = num_forks();
  UnwaitedList::instance().add(*this);
}

void UnwaitedEntry::arrive() {
  if (is_listed()) {
    UnwaitedList::instance().note_arrival(*this);
  }
}

void UnwaitedEntry::leave(bool is_dropped) {
  if (is_listed()) {
    UnwaitedList::instance().remove(*this, is_dropped);
  }
  collective_ = nullptr;
}

std::map<std::string, int64_t> unwaited_collectives() { return UnwaitedList::instance().counts(); }

void wait_for_unwaited(std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  auto works = UnwaitedList::instance().works();
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

namespace {

// A collective whose Work PyTorch's registry keeps, until it is waited for.
struct RegisteredCollective {
  InFlight description;
  c10::weak_intrusive_ptr<Work> work{c10::intrusive_ptr<Work>()};
  // The registry's keys. Their addresses are not reused while something refers to them.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;

  bool writes(const at::Tensor& tensor) const {
    const auto* const own = tensor.storage().unsafeGetStorageImpl();
    return std::ranges::any_of(storages, [own](const auto& one) { return one._unsafe_get_target() == own; });
  }
};

class RegisteredList final : public ForkSafe<RegisteredList> {
 public:
  // Adds `registered`. Drops two earlier collectives if their Works are gone, so that the list is about as
  // long as the number of collectives in it that still run.
  void add(RegisteredCollective registered) {
    std::array<RegisteredCollective, 2> gone;  // destroyed outside the lock
    const std::scoped_lock lock(mutex_);
    for (auto& first : gone) {
      if (!list_.empty()) {
        first = std::move(list_.front());
        list_.pop_front();
        if (!first.work.expired()) {
          list_.push_back(std::move(first));
        }
      }
    }
    list_.push_back(std::move(registered));
  }

  // Returns the latest collective that writes to `tensor`, also just after its Work was destroyed.
  std::optional<InFlight> latest_of(const at::Tensor& tensor) {
    const std::scoped_lock lock(mutex_);
    const auto found =
        std::find_if(list_.rbegin(), list_.rend(), [&](const auto& one) { return one.writes(tensor); });
    return found == list_.rend() ? std::nullopt : std::optional(found->description);
  }

  std::vector<RegisteredCollective> all() {
    const std::scoped_lock lock(mutex_);
    return {list_.begin(), list_.end()};
  }

 private:
  friend class ForkSafe<RegisteredList>;
  void reset_in_child() { leak(list_); }

  std::deque<RegisteredCollective> list_;
};

// Visits every collective with its Work, which is null for dropped collectives.
template <typename Visit>
void visit_all(const Visit& visit) {
  for (auto& description : kept_orphans()) {
    visit(std::move(description), c10::intrusive_ptr<Work>(), nullptr);
  }
  for (auto& [entry, description, work] : UnwaitedList::instance().works()) {
    visit(std::move(description), work, entry);
  }
  for (auto& registered : RegisteredList::instance().all()) {
    if (const auto work = registered.work.lock()) {
      visit(std::move(registered.description), work, nullptr);
    }
  }
}

std::vector<InFlight> in_flight_except(const UnwaitedEntry* own, QueriedWorks queried) {
  std::optional<CaptureSafeQuery> query;
  if (queried == QueriedWorks::kAll) {
    query.emplace();
    sweep_orphans();
  }
  const bool may_query_devices = query.has_value() && query->is_allowed();
  std::vector<InFlight> found;
  visit_all([&](InFlight description, const c10::intrusive_ptr<Work>& work, const UnwaitedEntry* entry) {
    const bool is_queried = work && (description.is_on_cpu ? !may_need_gil(*work) : may_query_devices);
    if ((entry == nullptr || entry != own) && !(is_queried && is_completed(*work))) {
      found.push_back(std::move(description));
    }
  });
  std::ranges::stable_sort(found, {}, [](const auto& description) { return description.started.at_ms; });
  return found;
}

std::string description_lines(const std::vector<InFlight>& collectives, size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(collectives.size(), most); ++i) {
    text += "\n  " + collectives[i].text();
  }
  if (collectives.size() > most) {
    text += c10::str("\n  and ", collectives.size() - most, " more");
  }
  return text;
}

}  // namespace

std::vector<InFlight> collectives_in_flight(QueriedWorks queried) {
  return in_flight_except(nullptr, queried);
}

void note_registered(std::string_view op, const GroupRef& group, const std::vector<at::Tensor>& outputs,
                     const c10::intrusive_ptr<Work>& work) {
  if (!work) {
    return;
  }
  RegisteredCollective registered{
      InFlight(op, group, outputs, CallSite::now()), c10::weak_intrusive_ptr<Work>(work), {}};
  for (const auto& output : outputs) {
    registered.storages.emplace_back(output.storage().getWeakStorageImpl());
  }
  RegisteredList::instance().add(std::move(registered));
}

void wait_on_registry(const at::Tensor& tensor) {
  run_described(
      [&] { c10d::wait_tensor(tensor); },
      [&](const char*) -> std::string {
        const auto description =
            tensor.has_storage() ? RegisteredList::instance().latest_of(tensor) : std::nullopt;
        return description.has_value() ? failure_text(*description) + "\n" + origin_text(*description) : "";
      });
}

std::string failure_text(const InFlight& description) {
  std::ostringstream text;
  text << "funcol::" << description.op << " failed on group '" << description.group.name()
       << "'; result of shape ";
  for (size_t i = 0; i < description.shapes.size(); ++i) {
    text << (i == 0 ? "" : ", ") << at::IntArrayRef(description.shapes[i]);
  }
  text << " has no data.";
  return text.str();
}

std::string origin_text(const InFlight& description) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << "It was started " << description.started.seconds() << " s ago"
       << own_rank_text(description.group);
  if (description.started.caller != nullptr) {
    text << " at " << *description.started.caller;
  }
  if (description.started.purpose != nullptr) {
    text << ", for " << *description.started.purpose;
  }
  text << ".";
  return text.str();
}

std::string others_in_flight(const UnwaitedEntry& own) {
  constexpr size_t kMost = 8;
  const auto others = in_flight_except(&own, QueriedWorks::kOnCpu);
  return others.empty() ? std::string()
                        : "\nAlso in flight in this process:" + description_lines(others, kMost);
}

std::string in_flight_text(const std::vector<InFlight>& collectives) {
  return c10::str("funcol: ", collectives.size(), " collectives in flight in process ", getpid(),
                  collectives.empty() ? "." : ", the oldest first:",
                  description_lines(collectives, collectives.size()), "\n");
}

}  // namespace funcol
