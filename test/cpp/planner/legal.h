// Checks a plan on every element of every rank.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/plan.h"

namespace funcol::test {

// The numbers of the elements that a rank holds, in memory order.
inline Indices elements(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                        const Coordinate& coordinate) {
  std::vector<Indices> held;
  held.reserve(shape.size());
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    held.push_back(naive_local_indices(layout, mesh, static_cast<int64_t>(dim), shape[dim], coordinate));
  }
  return elements_at(held, shape);
}

class LegalStep {
 public:
  LegalStep(const Plan& plan, const Step& step) : plan_(plan), step_(step) {}

  // Why the step is not legal; empty if it is.
  std::string objection() const {
    if (step_.axes == 0 || (funcol::num_axes(step_.axes) > 1 && !is_merged())) {
      return "no group of its axes";
    }
    try {
      make_layout("step", step_.after.placements, step_.after.order, plan_.mesh,
                  static_cast<int64_t>(plan_.shape.size()));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    if (!others_stay()) {
      return "another axis changes";
    }
    for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
      if (contains(step_.axes, axis) && !changes_by_kind(axis)) {
        return "axis " + std::to_string(axis) + " does not change by this kind of step";
      }
    }
    std::map<Coordinate, std::vector<Coordinate>> groups;
    for (const auto& coordinate : coordinates(plan_.mesh)) {
      Coordinate group = coordinate;
      for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
        group[axis] = contains(step_.axes, axis) ? 0 : group[axis];
      }
      groups[group].push_back(coordinate);
    }
    for (const auto& [first, ranks] : groups) {
      if (!group_can(ranks)) {
        return "ranks beside " + joined(first) + " do not hold what they should get";
      }
    }
    return "";
  }

 private:
  bool several(int64_t axis) const { return plan_.mesh.sizes[axis] > 1; }

  bool is_merged() const {
    const auto same = [&](AxisSet merged) {
      AxisSet axes = 0;
      for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
        axes |= contains(merged, axis) && several(axis) ? axis_set(axis) : 0;
      }
      return axes == step_.axes || merged == step_.axes;
    };
    return std::ranges::any_of(plan_.mesh.merged, same);
  }

  bool others_stay() const {
    const auto others = [&](const Layout& layout, size_t dim) {
      std::vector<int64_t> axes;
      for (const int64_t axis : layout.axes_of(static_cast<int64_t>(dim))) {
        if (several(axis) && !contains(step_.axes, axis)) {
          axes.push_back(axis);
        }
      }
      return axes;
    };
    for (size_t dim = 0; dim < plan_.shape.size(); ++dim) {
      if (others(step_.before, dim) != others(step_.after, dim)) {
        return false;
      }
    }
    for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
      if (several(axis) && !contains(step_.axes, axis) &&
          step_.before.placements[axis] != step_.after.placements[axis]) {
        return false;
      }
    }
    return true;
  }

  bool changes_by_kind(int64_t axis) const {
    const Placement& from = step_.before.placements[axis];
    const Placement& to = step_.after.placements[axis];
    switch (step_.kind) {
      case StepKind::kAllGather:
        return !several(axis) || (from.is_shard() && to.is_replicate());
      case StepKind::kReduceScatter:
        return !several(axis) || (from.is_partial() && from.mask == 0 && to.is_shard());
      case StepKind::kAllReduce:
        return !several(axis) || (from.is_partial() && from.mask == 0 && to.is_replicate());
      case StepKind::kAllToAll:
        return !several(axis) || (from.is_shard() && to.is_shard());
      case StepKind::kPermute:
        return !several(axis) || (!from.is_partial() && !to.is_partial());
      case StepKind::kSplit:
        return !several(axis) || (from.is_replicate() && to.is_shard());
      case StepKind::kToPartial:
        return from.is_replicate() && to.is_partial() && to == plan_.dst.placements[axis];
      case StepKind::kEmbed:
        return from.is_shard() && to.is_partial() && to == plan_.dst.placements[axis];
      case StepKind::kApplyMask:
        return from.is_partial() && from.mask != 0 && to == Placement::partial(from.op);
      case StepKind::kMask:
        return from.is_replicate() && to.mask != 0 && to == plan_.dst.placements[axis];
    }
    return false;
  }

  bool group_can(const std::vector<Coordinate>& ranks) const {
    std::vector<Indices> before;
    std::vector<Indices> after;
    Indices together;
    for (const auto& rank : ranks) {
      before.push_back(elements(step_.before, plan_.mesh, plan_.shape, rank));
      after.push_back(elements(step_.after, plan_.mesh, plan_.shape, rank));
      together.insert(together.end(), before.back().begin(), before.back().end());
    }
    const bool same_before =
        std::ranges::all_of(before, [&](const auto& one) { return one == before.front(); });
    switch (step_.kind) {
      case StepKind::kAllGather:
      case StepKind::kAllToAll:
        return all_within(after, std::vector(after.size(), together));
      case StepKind::kPermute:
        std::ranges::sort(before);
        std::ranges::sort(after);
        return before == after;
      case StepKind::kReduceScatter:
        return same_before && all_within(after, before);
      case StepKind::kSplit:
        return all_within(after, before);
      case StepKind::kEmbed:
        return all_within(after, std::vector(after.size(), together)) && all_within(before, after);
      case StepKind::kAllReduce:
      case StepKind::kToPartial:
      case StepKind::kApplyMask:
      case StepKind::kMask:
        return same_before && before == after;
    }
    return false;
  }

  static bool all_within(std::vector<Indices> parts, std::vector<Indices> wholes) {
    for (size_t i = 0; i < parts.size(); ++i) {
      std::sort(parts[i].begin(), parts[i].end());
      std::sort(wholes[i].begin(), wholes[i].end());
      if (!std::includes(wholes[i].begin(), wholes[i].end(), parts[i].begin(), parts[i].end())) {
        return false;
      }
    }
    return true;
  }

  const Plan& plan_;
  const Step& step_;
};

// Returns true if both layouts give every rank the same elements. Ignores placements on axes of one rank.
inline bool same_for_all_ranks(const Layout& a, const Layout& b, const Mesh& mesh,
                               const std::vector<int64_t>& shape) {
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.sizes[axis] > 1 && a.placements[axis] != b.placements[axis]) {
      return false;
    }
  }
  const auto ranks = coordinates(mesh);
  return std::ranges::all_of(ranks, [&](const auto& rank) {
    return elements(a, mesh, shape, rank) == elements(b, mesh, shape, rank);
  });
}

// Why the plan's steps do not lead from its source to its target; empty if they do.
inline std::string objection_to(const Plan& plan) {
  if (plan.steps.empty()) {
    return same_for_all_ranks(plan.src, plan.dst, plan.mesh, plan.shape) ? "" : "no steps";
  }
  if (plan.steps.front().before != plan.src) {
    return "does not begin at the source";
  }
  if (plan.steps.back().after != plan.dst) {
    return "ends at " + to_string(plan.steps.back().after);
  }
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    if (i > 0 && step.before != plan.steps[i - 1].after) {
      return "step " + std::to_string(i) + " begins elsewhere than the one before ends";
    }
    const std::string objection = LegalStep(plan, step).objection();
    if (!objection.empty()) {
      return to_string(step, plan.mesh) + " from " + to_string(step.before) + " to " + to_string(step.after) +
             ": " + objection;
    }
  }
  return "";
}

}  // namespace funcol::test
