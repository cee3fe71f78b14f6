#include "planner/steps.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace funcol {
namespace {

int64_t bytes_sent(const StepSize& size, int64_t num_ranks) {
  switch (size.kind) {
    case StepKind::kAllGather:
    case StepKind::kReduceScatter:
    case StepKind::kAllToAll:
      return size.bytes_full / num_ranks * (num_ranks - 1);
    case StepKind::kAllReduce:
      return 2 * size.bytes_full / num_ranks * (num_ranks - 1);
    case StepKind::kPermute:
      return size.bytes_full;
    default:
      return 0;
  }
}

}  // namespace

int64_t peak_bytes(const StepSize& size, bool first, int64_t src_bytes) {
  return src_bytes + (first ? 0 : size.bytes_before) + size.bytes_after +
         (communicates(size.kind) ? size.bytes_copied : 0);
}

int64_t peak_bytes(const Masks& masks, const Space& space) {
  const int64_t src_bytes = space.largest_shard(space.src()).bytes;
  const int64_t dst_bytes = space.largest_shard(space.dst()).bytes;
  bool first = true;
  int64_t most = std::numeric_limits<int64_t>::min();
  for (const int64_t axis : masks.applied_axes()) {
    most = std::max(most, peak_bytes(size_of_mask(StepKind::kApplyMask, axis, src_bytes), first, src_bytes));
    first = false;
  }
  first = first && space.src() == space.dst();
  for (const int64_t axis : masks.masked_axes()) {
    most = std::max(most, peak_bytes(size_of_mask(StepKind::kMask, axis, dst_bytes), first, src_bytes));
    first = false;
  }
  return most;
}

StepSize size_of_mask(StepKind kind, int64_t axis, int64_t bytes) {
  return {kind, axis_set(axis), bytes, bytes, 0, bytes};
}

Steps::Steps(const Redistribution& task, const Masks& masks, const Space& space, const Costs& costs)
    : task_(task),
      masks_(masks),
      space_(space),
      costs_(costs),
      src_bytes_(space.largest_shard(space.src()).bytes),
      dst_bytes_(space.largest_shard(space.dst()).bytes) {
  for (const int64_t axis : masks.applied_axes()) {
    add_mask(StepKind::kApplyMask, axis, masks.unmasked().src.placements[axis]);
  }
}

void Steps::add_mask(StepKind kind, int64_t axis, const Placement& placement) {
  const int64_t bytes = kind == StepKind::kMask ? dst_bytes_ : src_bytes_;
  Layout after = now();
  after.placements[axis] = placement;
  add(size_of_mask(kind, axis, bytes), std::move(after));
}

void Steps::add(const StepSize& size, Layout after) {
  const Coordinate first_rank(task_.mesh.num_axes(), 0);
  // Steps that scatter take their logical shape from the layout after them, others from the layout before.
  const bool scatters = size.kind == StepKind::kReduceScatter || size.kind == StepKind::kSplit;
  auto shape = logical_shape(scatters ? after : now(), task_.mesh, task_.shape, size.axes, first_rank);
  steps_.push_back({size.kind, size.axes, now(), std::move(after), std::move(shape), costs_.of(size),
                    bytes_sent(size, task_.mesh.num_ranks(size.axes)),
                    peak_bytes(size, steps_.empty(), src_bytes_)});
}

Plan Steps::finish() {
  for (const int64_t axis : masks_.masked_axes()) {
    add_mask(StepKind::kMask, axis, task_.dst.placements[axis]);
  }
  if (!steps_.empty()) {
    steps_.back().after = task_.dst;  // axes of one rank, which masks leave as src has them
  }
  Plan plan{task_.mesh, task_.shape, task_.itemsize, task_.src, task_.dst, std::move(steps_), 0, src_bytes_};
  for (const auto& step : plan.steps) {
    plan.cost += step.cost;
    plan.peak_bytes = std::max(plan.peak_bytes, step.peak_bytes);
  }
  return plan;
}

}  // namespace funcol
