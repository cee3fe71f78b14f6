// The ranks of a process group that runs along axes of a mesh, as coordinates.
//
// Worked case, axes {0, 2} of a 2 x 3 x 2 mesh, seen by the rank at (1, 2, 0): group ranks 0 to 3 are (0, 2,
// 0), (0, 2, 1), (1, 2, 0), (1, 2, 1).
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <vector>

#include "comm/group_ref.h"
#include "layout/mesh.h"

namespace funcol {

// A process group along axes of a mesh.
struct AxisGroup {
  c10::IValue group;  // as the funcol ops take it: a name, or a ProcessGroup
  // By group rank, the row-major number of its coordinate on the axes; empty if both are always equal.
  std::vector<int64_t> members;
  GroupRef ref = {};  // the group as it was when its mesh was first seen
};
using AxisGroups = std::map<AxisSet, AxisGroup>;

// Returns true if the group was neither aborted nor reconfigured since its mesh was first seen. If it was, it
// may have other ranks now.
bool is_current(const GroupRef& group);

// Raises ValueError naming `op` unless is_current(group).
void check_is_current(const GroupRef& group, const char* op);

class GroupRanks {
 public:
  // Keeps a reference to `mesh`, not a copy. `members` is that of the AxisGroup.
  GroupRanks(const Mesh& mesh, AxisSet axes, Coordinate own, std::vector<int64_t> members = {});

  int64_t size() const { return static_cast<int64_t>(coordinates_.size()); }
  AxisSet axes() const { return axes_; }
  int64_t own_rank() const { return rank_of(own_); }
  const Coordinate& own() const { return own_; }
  const Coordinate& coordinate(int64_t rank) const { return coordinates_[rank]; }
  // Returns the group rank at `coordinate`, which differs from own() on the group's axes alone.
  int64_t rank_of(const Coordinate& coordinate) const;

 private:
  const Mesh& mesh_;
  AxisSet axes_;
  Coordinate own_;
  std::vector<Coordinate> coordinates_;
  std::vector<int64_t> rank_at_place_;
};

}  // namespace funcol
