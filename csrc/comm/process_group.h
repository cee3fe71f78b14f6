// The c10d::ProcessGroup that a name, an object or a list of ranks refers to.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/group_ref.h"

namespace funcol {

// Returns the group registered under `name` in c10d's group registry. Raises ValueError naming `op` and
// `name` if there is none.
//
// After remember_groups(true) each thread remembers its last few names, and a repeated call does not search
// the registry; forget_groups() then has to be called whenever the registry changes. In c10d's thread
// isolation mode, where each simulated rank has a registry of its own, remembering must be off.
GroupPtr group_from_name(std::string_view name, const char* op);
bool has_group_named(std::string_view name);
void remember_groups(bool enabled);
void forget_groups();

// Returns the group of an `Any` schema argument: a name, or a ProcessGroup object. Raises TypeError naming
// `op` for anything else.
GroupPtr group_from_ivalue(const c10::IValue& group, const char* op);

// Returns the group of the global `ranks` that was made under `tag`, as c10d_functional's operators name
// groups. Raises ValueError naming `op`, `ranks` and `tag` if there is none. Remembers groups like
// group_from_name().
GroupPtr group_from_ranks(at::IntArrayRef ranks, std::string_view tag, const char* op);

// A function that finds the name of such a group for group_from_ranks(), or nullopt. To be set once.
using RanksResolver = std::function<std::optional<std::string>(std::vector<int64_t>, std::string)>;
void set_ranks_resolver(RanksResolver resolver);

// Returns `group` as an op's argument: its name if the registry has the group under that name, so that graphs
// and backward passes keep no group alive; else the group itself.
c10::IValue as_ivalue(const GroupPtr& group);

// Returns the group's name, for messages; "(unnamed)" if it was made without one.
std::string group_name(const c10d::ProcessGroup& group);

// Raises ValueError unless `group_size` is the number of ranks in `group`.
void check_group_size(const c10d::ProcessGroup& group, int64_t group_size, const char* op);

// Returns the group of a schema's `group` and `group_size` arguments, checked as group_from_ivalue() and
// check_group_size() do.
GroupPtr group_of_size(const c10::IValue& group, int64_t group_size, const char* op);

// Returns the name of the backend of `group` for `device_type`: "gloo", "nccl", "fake", ...
std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device_type);

// Returns true if that backend sends everything that is started between startCoalescing() and endCoalescing()
// as one operation, as NCCL does. On such a backend a batch of sends and receives needs coalescing: without
// it, ranks that send to each other deadlock.
bool backend_coalesces(c10d::ProcessGroup& group, c10::DeviceType device_type);

}  // namespace funcol
