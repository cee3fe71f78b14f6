// Planners of redistributions: the least-cost plan and PyTorch's greedy plan.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "planner/plan.h"

namespace funcol {

struct Redistribution {
  Mesh mesh;
  std::vector<int64_t> shape;  // of the full tensor
  int64_t itemsize = 1;
  Layout src;  // as make_layout() returns it
  Layout dst;
};

// The error if no plan stays within a bound on memory.
class BeyondMemory : public std::invalid_argument {
 public:
  BeyondMemory(const Redistribution& task, int64_t max_bytes, int64_t least_bytes);

  int64_t least_bytes() const { return least_bytes_; }  // the least bound within which there is a plan

 private:
  int64_t least_bytes_;
};

// A search that has expanded kMostExact states ends with a plan of at most kSlack times the least cost.
// Permutations of many dims on a mesh without merged groups need more states; the plans on up to three axes
// that tests compare with an exhaustive search need fewer.
constexpr int kMostExact = 128;
constexpr double kSlack = 1.25;

// Returns the plan of least cost under `model` whose steps each stay within `max_bytes` of memory, by A*
// search. Every rank gets the same plan.
//
// State: the placement of every axis that holds several ranks, and the order in which axes cut each dim.
// Steps from a state; the first four and the exchange run over one axis or over a merged set of axes:
//   all_gather      undoes the last cuts of a dim            S(d) -> R
//   all_to_all      moves the last cuts of a dim to another  S(a) -> S(b), after the cuts of b
//   all_reduce      reduces partials that commute            P -> R
//   reduce_scatter  reduces them and cuts a dim              P -> S(d), after the cuts of d
//   split           cuts a dim                               R -> S(d), after the cuts of d
//   to_partial      makes the partial that dst has           R -> P
//   embed           the same, except for an average          S -> P
//   exchange        gives axes their placements in dst       S.. -> S..
// An exchange is a permute if every rank sends its entire tensor to one rank, and then may also replicate;
// otherwise it is an all_to_all. Four or more axes cut a dim together only in mesh order or in the order of
// dst. Strided shards are made only where dst has them.
//
// Invariant: the cost so far is exact, and the estimate never exceeds the true rest. The first path on which
// dst leaves the queue therefore has the least cost, or after kMostExact states at most kSlack times that.
// Ties go to fewer steps, then to the state found first.
//
// Throws BeyondMemory if no plan fits `max_bytes`, and std::invalid_argument if a masked partial would have
// to change its shape, for norm partials, and for more than 8 axes of several ranks or 16 dims.
Plan plan_redistribution(const Redistribution& task, const CostModel& model,
                         std::optional<int64_t> max_bytes = std::nullopt);

// Returns PyTorch's greedy plan (greedy_order.h) with the costs of `model`. Unlike a least-cost plan, it may
// hold partials that do not commute. Throws std::invalid_argument unless shard orders are the default.
Plan greedy_redistribution(const Redistribution& task, const CostModel& model);

}  // namespace funcol
