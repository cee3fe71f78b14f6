// The order in which PyTorch's greedy planner changes the placements of mesh axes.
#pragma once

#include <utility>
#include <vector>

#include "layout/placement.h"

namespace funcol {

// Returns true if both placements cut `dim` in the same way, or neither cuts it.
inline bool cut_equally(const Placement& a, const Placement& b, int64_t dim) {
  const auto cuts = [dim](const Placement& placement) {
    return placement.is_shard() && placement.dim == dim;
  };
  return cuts(a) ? a == b : !cuts(b);
}

// Calls move(axis, from, to) for each change from the placements `now` to `target`, both in the default shard
// order. If a tensor on several axes `is_sharded`, axes are first changed from the last to the first; an axis
// is replicated there while an earlier axis still cuts its target dim differently. Then the remaining axes
// are changed from the first to the last. PyTorch's counterpart:
// DTensorRedistributePlanner.generate_greedy_transform_infos.
template <typename Move>
void visit_greedy_moves(std::vector<Placement> now, const std::vector<Placement>& target, bool is_sharded,
                        const Move& move) {
  const auto change = [&](size_t axis, const Placement& to) {
    if (now[axis] != to) {
      move(axis, now[axis], to);
      now[axis] = to;
    }
  };
  const auto is_blocked = [&](size_t axis) {
    for (size_t outer = 0; target[axis].is_shard() && outer < axis; ++outer) {
      if (!cut_equally(now[outer], target[outer], target[axis].dim)) {
        return true;
      }
    }
    return false;
  };
  if (is_sharded && now.size() > 1) {
    for (size_t axis = now.size(); axis-- > 0;) {
      change(axis, is_blocked(axis) ? Placement::replicate() : target[axis]);
    }
  }
  for (size_t axis = 0; axis < now.size(); ++axis) {
    change(axis, target[axis]);
  }
}

}  // namespace funcol
