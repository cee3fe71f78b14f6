#include "comm/group_ref.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/extract_if.h"
#include "comm/forks.h"
#include "comm/process_group.h"
#include "compat/process_group.h"

namespace funcol {
namespace {

using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

struct KnownGroup {
  std::string name;
  WeakGroup group;
  bool is_destroyed = false;
  GroupEnd last_end = GroupEnd::kAborted;  // that it lived through, at
  GroupMoment ended_at = 0;                // 0: none
  pid_t process = getpid();                // that made it

  bool has_changed() const { return is_destroyed || ended_at > 0; }
};

std::atomic<GroupMoment> moment{0};

struct KnownGroups {
  std::mutex mutex;
  std::vector<KnownGroup> groups;
  std::atomic<size_t> num_changed{0};  // of `groups`: nearly always 0
  std::atomic<bool> had_group{false};
};

// Returns the known groups, which are never destroyed: tensors may settle while the process exits.
KnownGroups& known_groups() {
  static auto* instance = new KnownGroups();  // NOLINT(cppcoreguidelines-owning-memory)
  return *instance;
}

bool has_backend(c10d::ProcessGroup& group, const c10d::Backend& backend) {
  return group.hasBackends() && std::ranges::any_of(group.getDeviceTypes(), [&](const auto& device) {
           return group.getBackend(device.type()).get() == &backend;
         });
}

// Returns true for a group that sends nothing and has no connections.
bool is_fake(c10d::ProcessGroup& group) {
  return group.hasBackends() && std::ranges::all_of(group.getDeviceTypes(), [&](const auto& device) {
           return group.getBackend(device.type())->getBackendName() == "fake";
         });
}

// Calls `change(groups)` under the lock, after dropping the groups that no longer exist.
template <typename Change>
void change_known_groups(const Change& change) {
  auto& known = known_groups();
  std::vector<KnownGroup> gone;  // destroyed outside the lock
  const std::scoped_lock lock(known.mutex);
  gone = extract_if(known.groups, [](const auto& entry) { return entry.group.expired(); });
  change(known.groups);
  known.num_changed.store(std::ranges::count_if(known.groups, &KnownGroup::has_changed),
                          std::memory_order_release);
}

}  // namespace

const char* to_string(GroupEnd end) {
  switch (end) {
    case GroupEnd::kDestroyed:
      return "was destroyed";
    case GroupEnd::kAborted:
      return "was aborted";
    case GroupEnd::kReconfigured:
      return "was reconfigured";
  }
  TORCH_INTERNAL_ASSERT(false);
}

GroupMoment group_moment() noexcept { return moment.load(std::memory_order_acquire); }

GroupRef::GroupRef(const GroupPtr& group) : GroupRef(group, group_moment()) {}

GroupRef::GroupRef(const GroupPtr& group, GroupMoment made_at)
    : name_(group_name(*group)), group_(group), made_at_(made_at) {}

std::optional<GroupEnd> GroupRef::end() const {
  if (!group_) {
    return std::nullopt;
  }
  if (group_->expired()) {
    return GroupEnd::kDestroyed;
  }
  auto& known = known_groups();
  if (known.num_changed.load(std::memory_order_acquire) == 0) {
    return std::nullopt;
  }
  const std::scoped_lock lock(known.mutex);
  for (const auto& entry : known.groups) {
    if (entry.group == *group_ && entry.ended_at > made_at_) {
      return entry.last_end;
    }
    if (entry.group == *group_ && entry.is_destroyed) {
      return GroupEnd::kDestroyed;
    }
  }
  return std::nullopt;
}

void check_is_usable(const GroupPtr& group, const char* op) {
  auto& known = known_groups();
  if (known.num_changed.load(std::memory_order_acquire) == 0 && num_forks() == 0) {
    return;
  }
  const std::scoped_lock lock(known.mutex);
  // A group that was registered again has several entries; the last one counts.
  const auto last = std::find_if(known.groups.rbegin(), known.groups.rend(),
                                 [&](const auto& entry) { return entry.group == WeakGroup(group); });
  if (last == known.groups.rend()) {
    return;
  }
  TORCH_CHECK_VALUE(!last->is_destroyed, "funcol::", op, ": process group '", last->name,
                    "' was destroyed. Call collectives before destroy_process_group(), or make a new group.");
  TORCH_CHECK_VALUE(
      last->process == getpid() || is_fake(*group), "funcol::", op, ": process group '", last->name,
      "' was made in process ", last->process, ", and this is process ", getpid(),
      ", a fork of it, such as a worker of a DataLoader. The connections of a group belong to the "
      "process that made it: call the collective there, or make a group in this process.");
}

bool had_group() noexcept { return known_groups().had_group.load(std::memory_order_relaxed); }

void note_group_added(const std::string& name) {
  if (const auto group = compat::registered_group(name)) {
    known_groups().had_group.store(true, std::memory_order_relaxed);
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
  std::vector<GroupPtr> held;  // released outside the lock
  change_known_groups([&](auto& groups) {
    for (auto& entry : groups) {
      held.push_back(entry.group.lock());
      // In c10d's thread isolation mode the registries of other threads keep theirs.
      entry.is_destroyed |= held.back() && compat::registered_group(entry.name) == held.back();
    }
  });
}

void note_group_ended(const GroupPtr& group, GroupEnd end) {
  change_known_groups([&](auto& groups) {
    const WeakGroup weak(group);
    auto entry = std::ranges::find_if(groups, [&](const auto& known) { return known.group == weak; });
    if (entry == groups.end()) {  // a group that was made without the registry
      entry = groups.insert(entry, {group_name(*group), weak});
    }
    entry->last_end = end;
    entry->ended_at = moment.fetch_add(1, std::memory_order_acq_rel) + 1;
  });
}

void note_backend_ended(const c10d::Backend& backend, GroupEnd end) {
  std::vector<GroupPtr> found;
  change_known_groups([&](auto& groups) {
    for (const auto& entry : groups) {
      auto group = entry.group.lock();
      if (group && has_backend(*group, backend)) {
        found.push_back(std::move(group));
      }
    }
  });
  for (const auto& group : found) {
    note_group_ended(group, end);
  }
}

}  // namespace funcol
