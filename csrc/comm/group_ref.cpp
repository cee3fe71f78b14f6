#include "comm/group_ref.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "compat/process_group.h"

namespace funcol {
namespace {

using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

struct KnownGroup {
  std::string name;
  WeakGroup group;
  bool is_destroyed = false;
};

struct KnownGroups {
  std::mutex mutex;
  std::vector<KnownGroup> groups;
  std::atomic<size_t> num_destroyed{0};  // of `groups`: nearly always 0
};

// Never destroyed: tensors may settle while the process exits.
KnownGroups& known_groups() {
  static auto* instance = new KnownGroups();  // NOLINT(cppcoreguidelines-owning-memory)
  return *instance;
}

// Calls `change(groups)` under the lock, after dropping the groups that nobody holds any more.
template <typename Change>
void change_known_groups(const Change& change) {
  auto& known = known_groups();
  std::vector<KnownGroup> gone;  // destroyed outside the lock
  const std::scoped_lock lock(known.mutex);
  const auto first_gone = std::stable_partition(known.groups.begin(), known.groups.end(),
                                                [](const auto& entry) { return !entry.group.expired(); });
  std::move(first_gone, known.groups.end(), std::back_inserter(gone));
  known.groups.erase(first_gone, known.groups.end());
  change(known.groups);
  known.num_destroyed.store(std::count_if(known.groups.begin(), known.groups.end(),
                                          [](const auto& entry) { return entry.is_destroyed; }),
                            std::memory_order_release);
}

}  // namespace

GroupRef::GroupRef(const GroupPtr& group) : name_(group_name(*group)), group_(group) {}

bool GroupRef::is_destroyed() const {
  if (!group_) {
    return false;
  }
  if (group_->expired()) {
    return true;
  }
  auto& known = known_groups();
  if (known.num_destroyed.load(std::memory_order_acquire) == 0) {
    return false;
  }
  const std::scoped_lock lock(known.mutex);
  return std::ranges::any_of(known.groups,
                             [&](const auto& entry) { return entry.is_destroyed && entry.group == *group_; });
}

void note_group_added(const std::string& name) {
  if (const auto group = compat::registered_group(name)) {
    change_known_groups([&](auto& groups) { groups.push_back({name, WeakGroup(group)}); });
  }
}

void note_group_removed(const std::string& name) {
  if (const auto group = compat::registered_group(name)) {
    change_known_groups([weak = WeakGroup(group)](auto& groups) {
      for (auto& entry : groups) {
        entry.is_destroyed |= entry.group == weak;
      }
    });
  }
}

void note_all_groups_removed() {
  std::vector<GroupPtr> held;  // let go of outside the lock
  change_known_groups([&](auto& groups) {
    for (auto& entry : groups) {
      held.push_back(entry.group.lock());
      // In c10d's thread isolation mode the registries of other threads keep theirs.
      entry.is_destroyed |= held.back() && compat::registered_group(entry.name) == held.back();
    }
  });
}

}  // namespace funcol
