#include <algorithm>
#include <stdexcept>
#include <utility>

#include "planner/greedy_order.h"
#include "planner/search.h"
#include "planner/steps.h"

namespace funcol {
namespace {

// PyTorch's greedy planner, which plans the steps of one axis after the other.
class GreedyPlanner {
 public:
  explicit GreedyPlanner(const Redistribution& task, const Space& space, Steps& steps)
      : mesh_(task.mesh), dst_(task.dst), space_(space), steps_(steps), now_(task.src) {}

  void run() {
    bool is_sharded = false;
    for (int64_t axis = 0; axis < mesh_.num_axes(); ++axis) {
      is_sharded = is_sharded || (now_.placements[axis].is_shard() && mesh_.sizes[axis] > 1);
    }
    visit_greedy_moves(now_.placements, dst_.placements, is_sharded,
                       [this](size_t axis, const Placement& from, const Placement& to) {
                         move(static_cast<int64_t>(axis), from, to);
                       });
  }

 private:
  // Takes the step from `from` to `to`, by way of Replicate if there is no such step.
  void move(int64_t axis, const Placement& from, const Placement& to) {
    const bool is_one_step =
        from.is_replicate() || to.is_replicate() ||
        (from.is_shard() && to.is_shard() && from.dim != to.dim && !from.is_strided() && !to.is_strided()) ||
        (from.is_partial() && to.is_shard() && !to.is_strided()) ||
        (from.is_shard() && to.is_partial() && to.op == PartialOp::kSum && !from.is_strided());
    if (!is_one_step) {
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
      add_cut(now_.order, to.dim, axis);
    }
    if (mesh_.sizes[axis] == 1) {
      return;
    }
    const State after = space_.state(now_);
    const auto& groups = space_.slot_groups();
    const auto group =
        std::ranges::find_if(groups, [axis](const auto& one) { return one.axes == axis_set(axis); });
    steps_.add(space_.move(kind(from, to), *group, before, space_.largest_shard(before), after));
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
    throw std::invalid_argument("greedy_redistribution: " + to_string(layout) +
                                " has a shard order of its own, for which PyTorch has no greedy plan. Use "
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
  GreedyPlanner(masks.unmasked(), space, steps).run();
  return steps.finish();
}

}  // namespace funcol
