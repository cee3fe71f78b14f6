// References to process groups; a weak one still knows the group's name and whether the group has ended.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

namespace funcol {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// The ways in which a group can end for objects that refer to it: results, meshes, plans.
enum class GroupEnd : uint8_t {
  kDestroyed,     // it left c10d's registry, or no longer exists
  kAborted,       // its connections were cut; what was under way is lost
  kReconfigured,  // the same object now has other ranks
};

// Returns "was destroyed", "was aborted" or "was reconfigured".
const char* to_string(GroupEnd end);

// The number of aborts and reconfigurations in this process. An object that was made at an earlier moment may
// belong to an earlier state of its group.
using GroupMoment = uint64_t;
GroupMoment group_moment() noexcept;

// A weak reference to a group.
class GroupRef {
 public:
  GroupRef() = default;
  // Refers to the group as it is now, or as it was at an earlier moment.
  GroupRef(const GroupPtr& group);  // NOLINT(google-explicit-constructor): as cheap as a copy of the pointer
  GroupRef(const GroupPtr& group, GroupMoment made_at);
  // Makes a name without a group, which never ends.
  explicit GroupRef(std::string name) : name_(std::move(name)) {}

  const std::string& name() const noexcept { return name_; }

  // Returns the group; null if it no longer exists.
  GroupPtr lock() const { return group_ ? group_->lock() : GroupPtr(); }

  // Returns how the group ended since the reference was made; nullopt if it has not. Destroying a group
  // removes it from c10d's registry; its object may live on, in a variable of the caller or in a cache.
  std::optional<GroupEnd> end() const;

 private:
  std::string name_;
  std::optional<c10::weak_intrusive_ptr<c10d::ProcessGroup>> group_;
  GroupMoment made_at_ = 0;
};

// Raises ValueError naming `op` if `group` was destroyed, or was made by the process that this one was forked
// from: its connections belong to that process, and a collective would wait forever. Takes a few nanoseconds
// in a process that is not a fork while no known group has been destroyed or changed.
void check_is_usable(const GroupPtr& group, const char* op);

// Returns true once c10d's registry has had a group in this process.
bool had_group() noexcept;

// Records a change of c10d's registry. To be called after a group was added under `name`, before that group
// is removed, before all groups of this thread's registry are removed. Ignores names without a group.
void note_group_added(const std::string& name);
void note_group_removed(const std::string& name);
void note_all_groups_removed();

// Records the end of a group, for the references that were made earlier. To be called before the group is
// aborted or reconfigured, by itself or by its backend. Ignores a backend that no known group has.
void note_group_ended(const GroupPtr& group, GroupEnd end);
void note_backend_ended(const c10d::Backend& backend, GroupEnd end);

}  // namespace funcol
