// From what a caller names a group by to the c10d::ProcessGroup.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace funcol {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// The group registered under `name` in c10d's group registry.
// ValueError naming `op` and `name` if there is none.
//
// The last few names of each thread are remembered, so a repeated call does not search the registry.
// That holds only while forget_groups() is called whenever the registry changes; until
// remember_groups(true) says that somebody does, every call asks the registry. (In c10d's thread isolation
// mode, where each simulated rank has a registry of its own, remembering must be off.)
GroupPtr group_from_name(std::string_view name, const char* op);

// The same for an `Any` schema argument: a name, or a ProcessGroup object.
// TypeError naming `op` for anything else.
GroupPtr group_from_ivalue(const c10::IValue& group, const char* op);

// The group that consists of `ranks`, global ones, and was made under `tag`: what c10d_functional's operators
// name a group by. ValueError naming `op`, `ranks` and `tag` if there is none. Remembered as above.
GroupPtr group_from_ranks(at::IntArrayRef ranks, std::string_view tag, const char* op);

// What group_from_ranks asks: the group's name, or nothing if there is none. To be set once, before it is
// needed.
using RanksResolver = std::function<std::optional<std::string>(std::vector<int64_t>, std::string)>;
void set_ranks_resolver(RanksResolver resolver);
// What stands for `group` as an op's argument: its name where the registry has it under that name, so that
// graphs and backward passes keep no group alive; else the group itself.
c10::IValue as_ivalue(const GroupPtr& group);

void remember_groups(bool enabled);
void forget_groups();

// The group's name, for messages; "(unnamed)" if it was made without one.
std::string group_name(const c10d::ProcessGroup& group);

// ValueError unless `group_size` is the number of ranks in `group`.
void check_group_size(const c10d::ProcessGroup& group, int64_t group_size, const char* op);

// The group behind a schema's `group_name` and `group_size` arguments: both checks above.
GroupPtr group_of_size(const c10::IValue& group, int64_t group_size, const char* op);

// Name of the backend that serves `device_type` in `group`: "gloo", "nccl", "fake", ...
std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device_type);

// Whether that backend sends what is started between startCoalescing() and endCoalescing() as one, as NCCL's
// do: a batch of sends and receives has to go so, or ranks that send to each other wait for ever.
bool backend_coalesces(c10d::ProcessGroup& group, c10::DeviceType device_type);

}  // namespace funcol
