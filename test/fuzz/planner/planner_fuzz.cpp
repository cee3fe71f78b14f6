// Plans of redistributions: each is legal, gives the right numbers on simulated ranks, costs at most
// PyTorch's greedy plan, and keeps to its bound on memory.
#include <algorithm>
#include <stdexcept>

#include "bytes.h"
#include "failure.h"
#include "fuzz_target.h"
#include "plan_choices.h"
#include "plan_run.h"
#include "planner/legal.h"
#include "planner/search.h"
#include "planner/shortest_paths.h"
#include "planner/tasks.h"

namespace funcol::test {
namespace {

// Costs are sums of up to ten numbers.
constexpr double kRounding = 1e-9;

bool has_mask(const Layout& layout) {
  return std::ranges::any_of(layout.placements, [](const auto& placement) { return placement.mask != 0; });
}

// The numbers that the ranks hold before: those that a mask hides are anything.
RankTensors tensors_before(const Redistribution& task, const Numbers& whole) {
  Layout unmasked = task.src;
  for (auto& placement : unmasked.placements) {
    placement = placement.mask != 0 ? Placement::replicate() : placement;
  }
  auto tensors = distributed(whole, unmasked, task.mesh, 1);
  const auto ranks = coordinates(task.mesh);
  for (int64_t axis = 0; axis < task.mesh.num_axes(); ++axis) {
    for (size_t rank = 0; task.src.placements[axis].mask != 0 && rank < ranks.size(); ++rank) {
      const auto held = elements(task.src, task.mesh, task.shape, ranks[rank]);
      for (size_t i = 0; i < held.size(); ++i) {
        if (is_masked_out(held[i], ranks[rank][axis], task.mesh.sizes[axis])) {
          tensors[rank].values[i] = 7 * kUnit;
        }
      }
    }
  }
  return tensors;
}

void check(const Plan& plan, const Redistribution& task, const std::string& what) {
  if (const auto objection = objection_to(plan); !objection.empty()) {
    fail(what + " " + to_string(plan) + ": " + objection + "; " + described(task));
  }
  const Numbers whole = whole_numbers(task.shape);
  const auto after = PlanRun(plan, tensors_before(task, whole)).run();
  if (const auto wrong = difference(after, whole, task.dst, task.mesh); !wrong.empty()) {
    fail(what + " " + to_string(plan) + ": " + wrong + "; " + described(task));
  }
}

void check_no_dearer_than_greedy(const Plan& plan, const Redistribution& task, const CostModel& model) {
  const Plan greedy = greedy_redistribution(task, model);
  if (plan.cost > greedy.cost * (1 + kRounding)) {
    fail("the plan " + to_string(plan) + " costs more than the greedy " + to_string(greedy) + "; " +
         described(task));
  }
  check(greedy, task, "greedy plan");
}

// The bytes that the refusal names; -1 if the bound is not refused.
int64_t least_bytes(const Redistribution& task, const CostModel& model, int64_t max_bytes) {
  return number_in_refusal([&] { plan_redistribution(task, model, max_bytes); }, "max_bytes=([0-9]+)\\.$");
}

void check_bounds(Bytes& bytes, const Plan& free, const Redistribution& task, const CostModel& model) {
  const int64_t least = least_bytes(task, model, -1);
  const int64_t bound = least + (std::max(free.peak_bytes, least) - least) * bytes.below(5) / 4;
  const Plan plan = plan_redistribution(task, model, bound);
  check(plan, task, "plan within " + std::to_string(bound) + " bytes");
  for (const auto& step : plan.steps) {
    if (step.peak_bytes > bound) {
      fail("a step holds more than " + std::to_string(bound) + " bytes; " + described(task));
    }
  }
  if (plan.cost < free.cost * (1 - kRounding)) {
    fail("a bound makes the plan cheaper; " + described(task));
  }
  if (least_bytes(task, model, least - 1) != least) {
    fail("a byte less than the least bound is not refused; " + described(task));
  }
}

// Propagation prices layouts by paths that obey more restrictions.
void check_prices(const Plan& plan, const Redistribution& task, const CostModel& model) {
  const TensorMeta meta{task.shape, contiguous_strides(task.shape), Dtype::kFloat32};
  Redistribution of_floats = task;
  of_floats.itemsize = itemsize(meta.dtype);
  const double least =
      task.itemsize == of_floats.itemsize ? plan.cost : plan_redistribution(of_floats, model).cost;
  const double price = redistribution_costs({task.src}, {task.dst}, meta, task.mesh, model).at(0);
  if (price < least * (1 - kRounding)) {
    fail("priced below its cheapest plan; " + described(task));
  }
}

}  // namespace

void run(Bytes& bytes) {
  Redistribution task;
  task.mesh = mesh_from(bytes, 4, 16);
  const int64_t num_dims = bytes.below(4);
  task.shape = shape_from(bytes, num_dims, 64);
  task.itemsize = bytes.one_of<int64_t>({4, 1, 1 << 16});
  const auto src_op = reduction_from(bytes);
  const auto dst_op = bytes.coin() ? src_op : reduction_from(bytes);
  const auto checks = bytes.below(8);
  task.src = layout_from(bytes, task.mesh, num_dims, {src_op, bytes.coin(), true});
  task.dst = layout_from(bytes, task.mesh, num_dims, {dst_op, bytes.coin(), true});
  const CostModel model = model_from(bytes, task.mesh);

  Plan plan;
  try {
    plan = plan_redistribution(task, model);
  } catch (const std::invalid_argument& error) {
    if (has_mask(task.src) && has_mask(task.dst)) {
      return;  // a mask that stays while the tensor changes
    }
    fail(std::string("refused: ") + error.what() + "; " + described(task));
  }
  check(plan, task, "plan");
  if (src_op == dst_op && is_default(task.src.order) && is_default(task.dst.order)) {
    check_no_dearer_than_greedy(plan, task, model);
  }
  if (checks == 1) {
    check_bounds(bytes, plan, task, model);
  } else if (checks == 2 && !has_mask(task.src) && !has_mask(task.dst)) {
    check_prices(plan, task, model);
  }
}

}  // namespace funcol::test
