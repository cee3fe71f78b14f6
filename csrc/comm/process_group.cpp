#include "comm/process_group.h"

#include <array>
#include <atomic>
#include <utility>

#include "comm/backend_call.h"
#include "comm/custom_class.h"
#include "comm/group_ref.h"
#include "compat/process_group.h"

namespace funcol {
namespace {

std::atomic<bool> remembers_groups{false};
std::atomic<bool> replaced_c10d_ops{false};
// The number of changes of the registry. Groups that a thread remembered under an older number are void.
std::atomic<uint64_t> registry_generation{0};

// A thread's last few groups. Weak, so that it keeps no group alive.
class RecentGroups {
 public:
  GroupPtr find(std::string_view name) {
    const auto now = registry_generation.load(std::memory_order_acquire);
    for (auto& entry : entries_) {
      if (entry.generation == now && entry.name == name) {
        return entry.group.lock();
      }
    }
    return {};
  }

  void add(std::string_view name, const GroupPtr& group, uint64_t generation) {
    entries_[next_] =
        Entry{std::string(name), c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), generation};
    next_ = (next_ + 1) % entries_.size();
  }

 private:
  struct Entry {
    std::string name;
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group{GroupPtr()};
    uint64_t generation = ~uint64_t{0};
  };
  std::array<Entry, 8> entries_;
  size_t next_ = 0;
};

// Returns the group that `recent` has under `key`, else the group that `search` finds; null if there is none.
template <typename Search>
GroupPtr find_or_search(RecentGroups& recent, std::string_view key, const Search& search) {
  if (!remembers_groups.load(std::memory_order_relaxed)) {
    return search();
  }
  if (auto group = recent.find(key)) {
    return group;
  }
  const auto generation = registry_generation.load(std::memory_order_acquire);
  auto group = search();
  if (group) {
    recent.add(key, group, generation);
  }
  return group;
}

GroupPtr find_group(std::string_view name) {
  thread_local RecentGroups recent;
  return find_or_search(recent, name, [&] { return compat::registered_group(std::string(name)); });
}

RanksResolver& ranks_resolver() {
  static RanksResolver resolver;
  return resolver;
}

std::string key_of_ranks(at::IntArrayRef ranks, std::string_view tag) {
  std::string key;
  for (const auto rank : ranks) {
    key += std::to_string(rank);
    key += ',';
  }
  return key.append("|").append(tag);
}

}  // namespace

void set_c10d_ops_are_replaced(bool are_replaced) {
  replaced_c10d_ops.store(are_replaced, std::memory_order_relaxed);
}

bool c10d_ops_are_replaced() { return replaced_c10d_ops.load(std::memory_order_relaxed); }

bool has_group_named(std::string_view name) { return find_group(name).defined(); }

GroupPtr group_from_name(std::string_view name, const char* op) {
  auto group = find_group(name);
  TORCH_CHECK_VALUE(group.defined() || had_group(), "funcol::", op,
                    ": there is no process group yet: call torch.distributed.init_process_group() first.");
  TORCH_CHECK_VALUE(group.defined(), "funcol::", op, ": no process group is registered under the name '",
                    name,
                    "'. Expected the group_name of a live ProcessGroup that this rank belongs to; pass "
                    "group.group_name, the ProcessGroup itself, or a DeviceMesh.");
  check_is_usable(group, op);
  return group;
}

GroupPtr group_from_ranks(at::IntArrayRef ranks, std::string_view tag, const char* op) {
  thread_local RecentGroups recent;
  return find_or_search(recent, key_of_ranks(ranks, tag), [&] {
    const auto name = ranks_resolver()(ranks.vec(), std::string(tag));
    TORCH_CHECK_VALUE(name.has_value(), "funcol::", op, ": no process group has the ranks ", ranks,
                      " and the tag '", tag,
                      "'. Make it with torch.distributed.new_group on all ranks first.");
    return group_from_name(*name, op);
  });
}

void set_ranks_resolver(RanksResolver resolver) { ranks_resolver() = std::move(resolver); }

GroupPtr group_from_ivalue(const c10::IValue& group, const char* op) {
  if (group.isString()) {
    return group_from_name(group.toStringView(), op);
  }
  auto found = custom_class<c10d::ProcessGroup>(group);
  TORCH_CHECK_TYPE(found.defined(), "funcol::", op, ": the group is a ", group.tagKind(),
                   ". Expected a group name or a ProcessGroup that this rank belongs to.");
  check_is_usable(found, op);
  return found;
}

c10::IValue as_ivalue(const GroupPtr& group) {
  auto name = group_name(*group);
  return find_group(name) == group ? c10::IValue(std::move(name)) : c10::IValue(group);
}

void remember_groups(bool enabled) { remembers_groups.store(enabled, std::memory_order_relaxed); }

void forget_groups() { registry_generation.fetch_add(1, std::memory_order_acq_rel); }

std::string group_name(const c10d::ProcessGroup& group) {
  try {
    return group.getGroupName();
  } catch (const c10::Error&) {
    return "(unnamed)";
  }
}

void check_group_size(const c10d::ProcessGroup& group, int64_t group_size, const char* op) {
  TORCH_CHECK_VALUE(group.getSize() == group_size, "funcol::", op, ": group_size is ", group_size,
                    ", but group '", group_name(group), "' has ", group.getSize(),
                    " ranks. Pass the group's own size.");
}

GroupPtr group_of_size(const c10::IValue& group, int64_t group_size, const char* op) {
  auto found = group_from_ivalue(group, op);
  check_group_size(*found, group_size, op);
  return found;
}

std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  return group.hasBackends() ? group.getBackend(device_type)->getBackendName() : group.getBackendName();
}

bool backend_coalesces(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  return group.hasBackends() ? group.getBackend(device_type)->supportsCoalescing()
                             : group.getBackendName() == "nccl";
}

}  // namespace funcol
