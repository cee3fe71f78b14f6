#include "async/in_flight.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <iomanip>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "comm/capture_safe_query.h"
#include "comm/orphaned_works.h"

namespace funcol {
namespace {

using Work = c10d::Work;

// A collective whose Work PyTorch's registry keeps, until somebody waits for it.
struct Registered {
  InFlight what;
  c10::weak_intrusive_ptr<Work> work{c10::intrusive_ptr<Work>()};
  // The registry's keys, which stay theirs as long as something refers to them.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;

  bool writes(const at::Tensor& tensor) const {
    const auto* const own = tensor.storage().unsafeGetStorageImpl();
    return std::ranges::any_of(storages, [own](const auto& one) { return one._unsafe_get_target() == own; });
  }
};

class RegisteredList {
 public:
  // Never destroyed: tensors may be destroyed later than static objects.
  static RegisteredList& instance() {
    static auto* const list = new RegisteredList();  // NOLINT(cppcoreguidelines-owning-memory)
    return *list;
  }

  // Also looks at two of the earlier ones, so that the list is about as long as the number of those in it
  // that still run.
  void add(Registered registered) {
    std::array<Registered, 2> gone;  // destroyed outside the lock
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

  // The latest collective that writes to `tensor`, also just after its Work has gone.
  std::optional<InFlight> latest_of(const at::Tensor& tensor) {
    const std::scoped_lock lock(mutex_);
    const auto found =
        std::find_if(list_.rbegin(), list_.rend(), [&](const auto& one) { return one.writes(tensor); });
    return found == list_.rend() ? std::nullopt : std::optional(found->what);
  }

  std::vector<Registered> all() {
    const std::scoped_lock lock(mutex_);
    return {list_.begin(), list_.end()};
  }

 private:
  // A fork waits until no thread is inside. The child starts with an empty list, and leaks its parent's.
  RegisteredList() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     auto& child = instance();
                     new std::deque<Registered>(std::move(child.list_));  // NOLINT
                     child.list_.clear();
                     child.mutex_.unlock();
                   });
  }

  std::mutex mutex_;
  std::deque<Registered> list_;
};

// A Work that is written in Python needs the GIL to answer. It does not name its operation.
bool may_need_gil(const Work& work) { return work.retrieveOpType() == c10d::OpType::UNKNOWN; }

// Every collective with its Work; dropped ones without.
template <typename Visit>
void visit_all(const Visit& visit) {
  for (auto& what : kept_orphans()) {
    visit(std::move(what), c10::intrusive_ptr<Work>(), nullptr);
  }
  for (auto& [entry, what, work] : unwaited_works()) {
    visit(std::move(what), work, entry);
  }
  for (auto& registered : RegisteredList::instance().all()) {
    if (const auto work = registered.work.lock()) {
      visit(std::move(registered.what), work, nullptr);
    }
  }
}

std::vector<InFlight> in_flight_but(const UnwaitedEntry* own, AskWorks asked) {
  std::optional<AskingDevices> asking;
  if (asked == AskWorks::kAll) {
    asking.emplace();
    sweep_orphans();
  }
  const bool asks_devices = asking.has_value() && asking->is_allowed();
  std::vector<InFlight> found;
  visit_all([&](InFlight what, const c10::intrusive_ptr<Work>& work, const UnwaitedEntry* entry) {
    const bool is_asked = work && (what.is_on_cpu ? !may_need_gil(*work) : asks_devices);
    if ((entry == nullptr || entry != own) && !(is_asked && is_completed(*work))) {
      found.push_back(std::move(what));
    }
  });
  std::ranges::stable_sort(found, {}, [](const auto& what) { return what.started.at_ms; });
  return found;
}

std::string lines(const std::vector<InFlight>& collectives, size_t most) {
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

std::vector<InFlight> collectives_in_flight(AskWorks asked) { return in_flight_but(nullptr, asked); }

void note_registered(std::string_view op, const GroupRef& group, const std::vector<at::Tensor>& outputs,
                     const c10::intrusive_ptr<Work>& work) {
  if (!work) {
    return;
  }
  Registered registered{
      InFlight(op, group, outputs, CallSite::now()), c10::weak_intrusive_ptr<Work>(work), {}};
  for (const auto& output : outputs) {
    registered.storages.emplace_back(output.storage().getWeakStorageImpl());
  }
  RegisteredList::instance().add(std::move(registered));
}

void wait_on_registry(const at::Tensor& tensor) {
  const auto names = [&]() -> std::string {
    const auto what = tensor.has_storage() ? RegisteredList::instance().latest_of(tensor) : std::nullopt;
    return what.has_value() ? failure_text(*what) + "\n" + origin_text(*what) : std::string();
  };
  try {
    c10d::wait_tensor(tensor);
  } catch (c10::Error& error) {
    if (auto text = names(); !text.empty()) {
      error.add_context(std::move(text));
    }
    throw;
  } catch (const std::exception& error) {
    if (const auto text = names(); !text.empty()) {
      C10_THROW_ERROR(DistBackendError, error.what() + ("\n" + text));
    }
    throw;
  }
}

std::string failure_text(const InFlight& what) {
  std::ostringstream text;
  text << "funcol::" << what.op << " failed on group '" << what.group.name() << "'; result of shape ";
  for (size_t i = 0; i < what.shapes.size(); ++i) {
    text << (i == 0 ? "" : ", ") << at::IntArrayRef(what.shapes[i]);
  }
  text << " has no data.";
  return text.str();
}

std::string origin_text(const InFlight& what) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << "It was started " << what.started.seconds() << " s ago"
       << own_rank_text(what.group);
  if (what.started.caller != nullptr) {
    text << " at " << *what.started.caller;
  }
  if (what.started.purpose != nullptr) {
    text << ", for " << *what.started.purpose;
  }
  text << ".";
  return text.str();
}

std::string others_in_flight(const UnwaitedEntry& own) {
  constexpr size_t kMost = 8;
  const auto others = in_flight_but(&own, AskWorks::kOnCpu);
  return others.empty() ? std::string() : "\nAlso in flight in this process:" + lines(others, kMost);
}

std::string in_flight_text(const std::vector<InFlight>& collectives) {
  return c10::str("funcol: ", collectives.size(), " collectives in flight in process ", getpid(),
                  collectives.empty() ? "." : ", the oldest first:", lines(collectives, collectives.size()),
                  "\n");
}

}  // namespace funcol
