// A weak reference to a process group, which still knows the group's name.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "comm/process_group.h"

namespace funcol {

class GroupRef {
 public:
  GroupRef() = default;
  GroupRef(const GroupPtr& group);  // NOLINT(google-explicit-constructor): as cheap as a copy of the pointer
  // A name without a group: never destroyed.
  explicit GroupRef(std::string name) : name_(std::move(name)) {}

  const std::string& name() const noexcept { return name_; }

  // The group, or null if nobody holds it any more.
  GroupPtr lock() const { return group_ ? group_->lock() : GroupPtr(); }

  // True once torch.distributed has destroyed the group, or nobody holds it any more. Destroying takes a
  // group out of c10d's registry; its object may live on, in a variable of the caller or behind a cache.
  bool is_destroyed() const;

 private:
  std::string name_;
  std::optional<c10::weak_intrusive_ptr<c10d::ProcessGroup>> group_;
};

// To be called when c10d's registry changes: after a group was added under `name`, before that group is
// removed, before all groups of this thread's registry are removed. Names without a group are ignored.
void note_group_added(const std::string& name);
void note_group_removed(const std::string& name);
void note_all_groups_removed();

}  // namespace funcol
