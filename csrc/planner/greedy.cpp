#include <algorithm>
#include <stdexcept>
#include <utility>

#include "planner/search.h"
#include "planner/steps.h"

namespace funcol {
namespace {

// Moves one axis after the other, as the reference does.
class Greedy {
 public:
  explicit Greedy(const Redistribution& task, const Space& space, Steps& steps)
      : mesh_(task.mesh), dst_(task.dst), space_(space), steps_(steps), now_(task.src) {}

  void run() {
    bool sharded = false;
    for (int64_t axis = 0; axis < mesh_.num_axes(); ++axis) {
      sharded = sharded || (now_.placements[axis].is_shard() && mesh_.sizes[axis] > 1);
    }
    // From the inner axes to the outer ones: what is cut differently further out is gathered on the way.
    for (int64_t axis = mesh_.num_axes() - 1; sharded && mesh_.num_axes() > 1 && axis >= 0; --axis) {
      const auto& target = dst_.placements[axis];
      const bool blocked =
          target.is_shard() && outer_cuts(now_, target.dim, axis) != outer_cuts(dst_, target.dim, axis);
      move(axis, blocked ? Placement::replicate() : target);
    }
    for (int64_t axis = 0; axis < mesh_.num_axes(); ++axis) {
      move(axis, dst_.placements[axis]);
    }
  }

 private:
  // Axis and split factor of each.
  static std::vector<std::pair<int64_t, int64_t>> outer_cuts(const Layout& layout, int64_t dim,
                                                             int64_t axis) {
    std::vector<std::pair<int64_t, int64_t>> cuts;
    for (const int64_t other : layout.axes_of(dim)) {
      if (other < axis) {
        cuts.emplace_back(other, layout.placements[other].split_factor);
      }
    }
    return cuts;
  }

  void move(int64_t axis, const Placement& to) {
    const Placement from = now_.placements[axis];
    if (from == to) {
      return;
    }
    const bool direct =
        from.is_replicate() || to.is_replicate() ||
        (from.is_shard() && to.is_shard() && from.dim != to.dim && from.split_factor == 1 &&
         to.split_factor == 1) ||
        (from.is_partial() && to.is_shard() && to.split_factor == 1) ||
        (from.is_shard() && to.is_partial() && to.op == PartialOp::kSum && from.split_factor == 1);
    if (!direct) {
      step(axis, Placement::replicate());
    }
    step(axis, to);
  }

  void step(int64_t axis, const Placement& to) {
    const Placement from = now_.placements[axis];
    const State before = space_.state(now_);
    if (from.is_shard()) {
      std::erase(now_.order[from.dim], axis);
    }
    now_.placements[axis] = to;
    if (to.is_shard()) {
      now_.order.resize(std::max(now_.order.size(), static_cast<size_t>(to.dim) + 1));
      now_.order[to.dim].push_back(axis);
    }
    if (mesh_.sizes[axis] == 1) {
      return;
    }
    const State after = space_.state(now_);
    const auto& units = space_.units();
    const auto unit =
        std::ranges::find_if(units, [axis](const auto& one) { return one.axes == axis_set(axis); });
    steps_.add(space_.move(kind(from, to), *unit, before, space_.held(before), after));
  }

  static StepKind kind(const Placement& from, const Placement& to) {
    if (from.is_replicate()) {
      return to.is_shard() ? StepKind::kSplit : StepKind::kToPartial;
    }
    if (from.is_partial()) {
      return to.is_shard() ? StepKind::kReduceScatter : StepKind::kAllReduce;
    }
    return to.is_shard() ? StepKind::kAllToAll : to.is_partial() ? StepKind::kEmbed : StepKind::kAllGather;
  }

  const Mesh& mesh_;
  const Layout& dst_;
  const Space& space_;
  Steps& steps_;
  Layout now_;
};

void check_default_order(const Layout& layout) {
  if (layout.order != default_shard_order(layout.placements)) {
    throw std::invalid_argument(
        "greedy_redistribution: " + to_string(layout) +
        " has a shard order of its own, for which the reference has no greedy plan. Use "
        "plan_redistribution.");
  }
}

}  // namespace

Plan greedy_redistribution(const Redistribution& task, const CostModel& model) {
  check_default_order(task.src);
  check_default_order(task.dst);
  const Masks masks(task);
  const Space space(masks.unmasked());
  const Costs costs(model, task.mesh);
  Steps steps(task, masks, space, costs);
  Greedy(masks.unmasked(), space, steps).run();
  return steps.finish();
}

}  // namespace funcol
