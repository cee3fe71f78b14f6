// Least-cost redistribution.
#pragma once

#include <optional>

#include "planner/plan.h"

namespace funcol {

struct Redistribution {
  Mesh mesh;
  std::vector<int64_t> shape;  // of the whole tensor
  int64_t itemsize = 1;
  Layout src;  // as make_layout() returns it
  Layout dst;
};

// Steps of least cost under `costs`, each peak within `max_bytes` if it is given; the same on every rank.
//
// State: the placement of every axis that holds more than one rank, and the order in which axes cut a dim.
// Steps from a state, the first four and the exchange over one axis or over a merged set of them:
//   all_gather      the last cuts of a dim                  S(d) -> R
//   all_to_all      the last cuts of a dim, to another      S(a) -> S(b), behind the cuts that b has
//   all_reduce      partials that commute                   P -> R
//   reduce_scatter  the same, behind the cuts of a dim      P -> S(d)
//   split           behind the cuts of a dim                R -> S(d)
//   to_partial      only to the partial that dst has there  R -> P
//   embed           the same, unless it is an average       S -> P
//   exchange        axes take their placements in dst       S.. -> S..
// An exchange is an all_to_all, or a permute where every rank's tensor goes to one rank as a whole; a permute
// may replicate, too. Four or more axes cut a dim together in the order of the mesh or in that of dst alone.
// A strided shard is made only where dst has it. Invariant: the cost so far is exact and the estimate of the
// rest never more than the true rest, so that the path on which dst leaves the queue first is a least one.
// Ties: the fewer steps, then the state found first.
//
// Throws std::invalid_argument if `max_bytes` is too small (and says the least that would do), if a masked
// partial has to change its shape, and for more than 8 axes of several ranks or 16 dims.
Plan plan_redistribution(const Redistribution& task, const CostModel& model,
                         std::optional<int64_t> max_bytes = std::nullopt);

// PyTorch's own plan for default shard orders (DTensorRedistributePlanner.generate_greedy_transform_infos):
// axis by axis, gathering what is nested in its way. Priced by `model`. Throws std::invalid_argument for
// other orders. It may hold partials at once that do not commute, which a least-cost plan never does.
Plan greedy_redistribution(const Redistribution& task, const CostModel& model);

}  // namespace funcol
