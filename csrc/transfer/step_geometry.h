// The indices of a step's tensor that each rank of its group holds before and after the step.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "layout/shards.h"
#include "planner/plan.h"
#include "transfer/exchange_plan.h"
#include "transfer/group_ranks.h"
#include "transfer/op_names.h"

namespace funcol {

struct StepGeometry {
  StepGeometry(const Plan& plan, const Step& step, const AxisGroups& groups, const Coordinate& coordinate)
      : mesh(plan.mesh),
        step(step),
        shape(plan.shape),
        group(find(plan, step, groups)),
        ranks(plan.mesh, step.axes, coordinate, group == nullptr ? std::vector<int64_t>() : group->members) {}

  static const AxisGroup* find(const Plan& plan, const Step& step, const AxisGroups& groups) {
    const auto found = groups.find(step.axes);
    TORCH_CHECK_VALUE(found != groups.end() || !communicates(step.kind), "funcol::", kRedistribute,
                      ": no process group for ", to_string(step, plan.mesh),
                      ". Plan with the merged axes that have one.");
    return found == groups.end() ? nullptr : &found->second;
  }

  Intervals before(int64_t dim, int64_t rank) const {
    return local_indices(step.before, mesh, dim, shape[dim], ranks.coordinate(rank));
  }
  Intervals after(int64_t dim, int64_t rank) const {
    return local_indices(step.after, mesh, dim, shape[dim], ranks.coordinate(rank));
  }
  int64_t num_dims() const { return static_cast<int64_t>(shape.size()); }
  std::vector<int64_t> shape_before() const { return local_shape(step.before, mesh, shape, ranks.own()); }
  std::vector<int64_t> shape_after() const { return local_shape(step.after, mesh, shape, ranks.own()); }

  // Returns the axes of the step that hold several ranks, first to last.
  std::vector<int64_t> axes() const {
    std::vector<int64_t> found;
    for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
      if (contains(step.axes, axis) && mesh.sizes[axis] > 1) {
        found.push_back(axis);
      }
    }
    return found;
  }

  // Returns the dim that `layout` shards on every axis of the step, or nullopt if there is none.
  std::optional<int64_t> common_dim(const Layout& layout) const {
    std::optional<int64_t> dim;
    for (const int64_t axis : axes()) {
      const auto& placement = layout.placements[axis];
      if (!placement.is_shard() || (dim.has_value() && *dim != placement.dim)) {
        return std::nullopt;
      }
      dim = placement.dim;
    }
    return dim;
  }

  [[noreturn]] void contradict(const char* why) const {
    TORCH_INTERNAL_ASSERT(false, "funcol::", kRedistribute, ": ", to_string(step, mesh), " from ",
                          to_string(step.before), " to ", to_string(step.after), " of ",
                          at::IntArrayRef(shape), ": ", why);
  }

  const Mesh& mesh;
  const Step& step;
  const std::vector<int64_t>& shape;
  const AxisGroup* group;
  GroupRanks ranks;
};

}  // namespace funcol
