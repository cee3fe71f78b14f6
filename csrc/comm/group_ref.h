// A process group as those remember it who must not keep it alive.
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
  // A name alone, for what no group of ours runs: never destroyed.
  explicit GroupRef(std::string name) : name_(std::move(name)) {}

  const std::string& name() const noexcept { return name_; }

  // The group, if somebody holds it still.
  GroupPtr lock() const { return group_ ? group_->lock() : GroupPtr(); }

  // True once torch.distributed has destroyed the group, or nobody holds it any more. Destroying takes a
  // group out of c10d's registry; its object may live on, in a variable of the caller or behind a cache.
  bool is_destroyed() const;

 private:
  std::string name_;
  std::optional<c10::weak_intrusive_ptr<c10d::ProcessGroup>> group_;
};

// Whoever changes c10d's registry says so here: a group has been added under `name`; it is about to be taken
// out; all groups of this thread's registry are. What the registry does not know is passed over.
void note_group_added(const std::string& name);
void note_group_removed(const std::string& name);
void note_all_groups_removed();

}  // namespace funcol
