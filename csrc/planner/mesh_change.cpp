#include "planner/mesh_change.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "layout/tensor_meta.h"

namespace funcol {
namespace {

// Ranks of larger meshes are not compared one by one.
constexpr int64_t kMostRanksCompared = 4096;

// Cuts the axes of two meshes of equally many ranks until both are made of the same ones.
class CommonAxes {
 public:
  // False if sizes do not divide each other.
  bool cut(const Mesh& src, const Mesh& dst) {
    src_axes.resize(src.sizes.size());
    dst_axes.resize(dst.sizes.size());
    size_t i = 0;
    size_t j = 0;
    int64_t src_rest = 1;
    int64_t dst_rest = 1;
    while (true) {
      while (src_rest == 1 && i < src.sizes.size()) {
        src_rest = src.sizes[i++];
      }
      while (dst_rest == 1 && j < dst.sizes.size()) {
        dst_rest = dst.sizes[j++];
      }
      if (src_rest == 1 && dst_rest == 1) {
        return true;
      }
      const int64_t size = std::min(src_rest, dst_rest);
      if (src_rest % size != 0 || dst_rest % size != 0) {
        return false;
      }
      const auto axis = axis_set(static_cast<int64_t>(sizes.size()));
      sizes.push_back(size);
      src_axes[i - 1] |= axis;
      dst_axes[j - 1] |= axis;
      src_rest /= size;
      dst_rest /= size;
    }
  }

  std::vector<int64_t> sizes;
  std::vector<AxisSet> src_axes;
  std::vector<AxisSet> dst_axes;
};

AxisSet joined(const std::vector<AxisSet>& axes, AxisSet of_view) {
  AxisSet all = 0;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    all |= contains(of_view, static_cast<int64_t>(axis)) ? axes[axis] : 0;
  }
  return all;
}

// Adds the sets of axes that have a group in a view.
void add_groups(const Mesh& view, const std::vector<AxisSet>& axes, Mesh& mesh) {
  const auto add = [&](AxisSet set) {
    if (num_axes(set) > 1 && std::ranges::find(mesh.merged, set) == mesh.merged.end()) {
      mesh.merged.push_back(set);
    }
  };
  std::ranges::for_each(axes, add);
  for (const AxisSet merged : view.merged) {
    add(joined(axes, merged));
  }
}

// The axis of a view that is this one axis of the common mesh; -1 if there is none.
int64_t view_axis(const std::vector<AxisSet>& axes, size_t axis) {
  const auto found = std::ranges::find(axes, axis_set(static_cast<int64_t>(axis)));
  return found == axes.end() ? -1 : found - axes.begin();
}

// The coordinate on a view of the rank at a coordinate of the common mesh.
Coordinate on_view(const Mesh& common, const std::vector<AxisSet>& axes, const Coordinate& coordinate) {
  Coordinate viewed(axes.size(), 0);
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    for (int64_t part = 0; part < common.num_axes(); ++part) {
      if (contains(axes[axis], part)) {
        viewed[axis] = viewed[axis] * common.sizes[part] + coordinate[part];
      }
    }
  }
  return viewed;
}

// The model of the common mesh: each axis costs what it costs as an axis of a view.
CostModel common_model(const CommonMesh& common, const MeshChangeCosts& models) {
  const auto* src = std::get_if<AlphaBeta>(&models.src);
  const auto* dst = std::get_if<AlphaBeta>(&models.dst);
  if (src == nullptr || dst == nullptr) {
    return models.src;
  }
  AlphaBeta model{{}, src->copy};
  for (size_t axis = 0; axis < common.mesh.sizes.size(); ++axis) {
    const int64_t of_src = view_axis(common.src_axes, axis);
    model.axes.push_back(of_src >= 0 ? src->axes.at(of_src) : dst->axes.at(view_axis(common.dst_axes, axis)));
  }
  return model;
}

std::vector<int64_t> axes_where(const Mesh& mesh, const Layout& layout, bool (Placement::*is)() const) {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.sizes[axis] > 1 && (layout.placements[axis].*is)()) {
      axes.push_back(axis);
    }
  }
  return axes;
}

Layout with_placements(Layout layout, const std::vector<int64_t>& axes, const Placement& placement) {
  for (const int64_t axis : axes) {
    layout.placements[axis] = placement;
    if (placement.is_shard()) {
      layout.order.resize(std::max(layout.order.size(), static_cast<size_t>(placement.dim) + 1));
      layout.order[placement.dim].push_back(axis);
    }
  }
  return layout;
}

// `layout` with `axes`, which cut nothing, cutting a dim last: the first one that all ranks share equally, or
// else the longest. Nothing for a tensor without dims.
std::optional<Layout> with_shards(const Mesh& mesh, const Layout& layout, const std::vector<int64_t>& axes,
                                  const std::vector<int64_t>& shape) {
  if (shape.empty() || axes.empty()) {
    return std::nullopt;
  }
  for (int64_t dim = 0; dim < static_cast<int64_t>(shape.size()); ++dim) {
    auto sharded = with_placements(layout, axes, Placement::shard(dim));
    if (shape[dim] > 0 && is_cut_evenly(sharded, mesh, dim, shape[dim])) {
      return sharded;
    }
  }
  const auto longest = std::ranges::max_element(shape) - shape.begin();
  return with_placements(layout, axes, Placement::shard(longest));
}

int64_t largest_bytes(const Mesh& mesh, const Layout& layout, const MeshChangeTask& task) {
  const Coordinate first(mesh.sizes.size(), 0);
  return num_elements(local_shape(layout, mesh, task.shape, first)) * task.itemsize;
}

// Compares plans.
class Candidates {
 public:
  Candidates(const MeshChangeTask& task, const MeshChangeCosts& models, std::optional<int64_t> max_bytes)
      : task_(task),
        models_(models),
        max_bytes_(max_bytes),
        src_costs_(models.src, task.src_mesh.mesh),
        dst_costs_(models.dst, task.dst_mesh.mesh),
        src_bytes_(largest_bytes(task.src_mesh.mesh, task.src, task)) {}

  MeshChange best() {
    add_on_common_mesh();
    const auto& mesh = task_.src_mesh.mesh;
    const auto partial = axes_where(mesh, task_.src, &Placement::is_partial);
    const auto reduced = with_placements(task_.src, partial, Placement::replicate());
    add_transfers(reduced);
    if (const auto scattered = with_shards(mesh, reduced, partial, task_.shape)) {
      add_transfers(*scattered);
    }
    if (!best_.has_value()) {
      refuse();
    }
    return *std::move(best_);
  }

 private:
  [[noreturn]] void refuse() const {
    if (least_peak_ == std::numeric_limits<int64_t>::max()) {
      throw std::invalid_argument(why_not_);
    }
    throw std::invalid_argument("plan_mesh_change: no plan from " + to_string(task_.src) + " to " +
                                to_string(task_.dst) + " stays within " + std::to_string(*max_bytes_) +
                                " bytes a rank. The least that a plan takes is " +
                                std::to_string(least_peak_) + ".");
  }

  void add_on_common_mesh() {
    const auto common = common_mesh(task_.src_mesh, task_.dst_mesh);
    if (!common.has_value()) {
      return;
    }
    auto src = layout_on_common(common->mesh, common->src_axes, task_.src_mesh.mesh, task_.src, task_.shape);
    auto dst = layout_on_common(common->mesh, common->dst_axes, task_.dst_mesh.mesh, task_.dst, task_.shape);
    if (!src.has_value() || !dst.has_value()) {
      return;
    }
    auto plan = planned(common->mesh, *std::move(src), *std::move(dst), common_model(*common, models_));
    if (plan.has_value()) {
      MeshChange change{task_, common, std::move(plan), {}, {}, 0, 0};
      change.cost = change.before->cost;
      change.peak_bytes = change.before->peak_bytes;
      add(std::move(change));
    }
  }

  // Adds the plans that transfer the tensor as `src`.
  void add_transfers(const Layout& src) {
    MeshChange change{task_, {}, {}, {}, {}, 0, 0};
    if (src != task_.src) {
      change.before = planned(task_.src_mesh.mesh, task_.src, src, models_.src);
      if (!change.before.has_value()) {
        return;
      }
    }
    const auto& mesh = task_.dst_mesh.mesh;
    const auto partial = axes_where(mesh, task_.dst, &Placement::is_partial);
    const auto reduced = with_placements(task_.dst, partial, Placement::replicate());
    if (!add_transfer(change, src, reduced)) {
      return;
    }
    const auto replicated = axes_where(mesh, reduced, &Placement::is_replicate);
    if (const auto scattered = with_shards(mesh, reduced, replicated, task_.shape)) {
      add_transfer(std::move(change), src, *scattered);
    }
  }

  // Whether senders are what the plan waits for.
  bool add_transfer(MeshChange change, const Layout& src, const Layout& dst) {
    change.transfer = plan_transfer({task_.src_mesh, src, task_.dst_mesh, dst, task_.shape, task_.itemsize});
    const auto loads = loads_of(*change.transfer);
    const bool waits_for_senders = loads.busiest_sender > loads.busiest_receiver;
    if (dst != task_.dst) {
      change.after = planned(task_.dst_mesh.mesh, dst, task_.dst, models_.dst);
      if (!change.after.has_value()) {
        return waits_for_senders;
      }
    }
    const int64_t kept = change.before.has_value() ? src_bytes_ : 0;
    change.cost = (change.before.has_value() ? change.before->cost : 0) + cost_of(loads) +
                  (change.after.has_value() ? change.after->cost : 0);
    change.peak_bytes =
        std::max({change.before.has_value() ? change.before->peak_bytes : 0, kept + loads.peak,
                  change.after.has_value() ? src_bytes_ + change.after->peak_bytes : 0});
    add(std::move(change));
    return waits_for_senders;
  }

  double cost_of(const TransferLoads& loads) const {
    const auto all_axes = [](const RankedMesh& mesh) {
      return static_cast<AxisSet>((uint64_t{1} << mesh.mesh.sizes.size()) - 1);
    };
    StepSize step{loads.total == 0 ? StepKind::kSplit : StepKind::kPermute};
    step.bytes_whole = std::max(loads.busiest_sender, loads.busiest_receiver);
    step.bytes_copied = loads.busiest_copier;
    const auto on = [&](const Costs& costs, const RankedMesh& mesh) {
      step.axes = all_axes(mesh);
      return costs.of(step);
    };
    return std::max(on(src_costs_, task_.src_mesh), on(dst_costs_, task_.dst_mesh));
  }

  // Nothing, and why_not_, if there is no plan.
  std::optional<Plan> planned(const Mesh& mesh, Layout src, Layout dst, const CostModel& model) {
    try {
      return plan_redistribution({mesh, task_.shape, task_.itemsize, std::move(src), std::move(dst)}, model,
                                 max_bytes_);
    } catch (const std::invalid_argument& error) {
      why_not_ = error.what();
      return std::nullopt;
    }
  }

  void add(MeshChange change) {
    if (max_bytes_.has_value() && change.peak_bytes > *max_bytes_) {
      least_peak_ = std::min(least_peak_, change.peak_bytes);
    } else if (!best_.has_value() || change.cost < best_->cost) {
      best_ = std::move(change);
    }
  }

  const MeshChangeTask& task_;
  const MeshChangeCosts& models_;
  std::optional<int64_t> max_bytes_;
  Costs src_costs_;
  Costs dst_costs_;
  int64_t src_bytes_;
  std::optional<MeshChange> best_;
  std::string why_not_;
  int64_t least_peak_ = std::numeric_limits<int64_t>::max();
};

}  // namespace

std::optional<CommonMesh> common_mesh(const RankedMesh& src, const RankedMesh& dst) {
  CommonAxes axes;
  if (src.ranks != dst.ranks || !axes.cut(src.mesh, dst.mesh)) {
    return std::nullopt;
  }
  CommonMesh common{{std::move(axes.sizes), {}, {}, src.mesh.ranks_per_host},
                    std::move(axes.src_axes),
                    std::move(axes.dst_axes)};
  for (size_t axis = 0; axis < common.mesh.sizes.size(); ++axis) {
    const int64_t of_src = view_axis(common.src_axes, axis);
    const int64_t of_dst = view_axis(common.dst_axes, axis);
    if (of_src < 0 && of_dst < 0) {
      return std::nullopt;
    }
    common.mesh.names.push_back(of_src >= 0 ? src.mesh.name(of_src) : dst.mesh.name(of_dst));
  }
  add_groups(src.mesh, common.src_axes, common.mesh);
  add_groups(dst.mesh, common.dst_axes, common.mesh);
  return common;
}

std::optional<Layout> layout_on_common(const Mesh& common, const std::vector<AxisSet>& axes, const Mesh& view,
                                       const Layout& layout, const std::vector<int64_t>& shape) {
  Layout on_common{std::vector<Placement>(common.sizes.size()), ShardOrder(layout.order.size())};
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    for (int64_t part = 0; part < common.num_axes(); ++part) {
      if (contains(axes[axis], part)) {
        on_common.placements[part] = layout.placements[axis];
      }
    }
  }
  for (size_t dim = 0; dim < layout.order.size(); ++dim) {
    auto& order = on_common.order[dim];
    for (const int64_t axis : layout.order[dim]) {
      for (int64_t part = 0; part < common.num_axes(); ++part) {
        if (contains(axes[axis], part)) {
          order.push_back(part);
        }
      }
    }
    const auto size = shape[dim];
    const bool is_same =
        common.num_ranks() <= kMostRanksCompared &&
        for_all_coordinates(common, order, [&](const Coordinate& coordinate) {
          return local_indices(on_common, common, static_cast<int64_t>(dim), size, coordinate) ==
                 local_indices(layout, view, static_cast<int64_t>(dim), size,
                               on_view(common, axes, coordinate));
        });
    if (!is_same) {
      return std::nullopt;
    }
  }
  while (!on_common.order.empty() && on_common.order.back().empty()) {
    on_common.order.pop_back();
  }
  return on_common;
}

MeshChange plan_mesh_change(const MeshChangeTask& task, const MeshChangeCosts& models,
                            std::optional<int64_t> max_bytes) {
  return Candidates(task, models, max_bytes).best();
}

std::string to_string(const MeshChange& change) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : " | ") + part; };
  if (change.before.has_value()) {
    add(to_string(*change.before));
  }
  if (change.transfer.has_value()) {
    add(to_string(change.transfer->task.src) + " => " + to_string(change.transfer->task.dst));
  }
  if (change.after.has_value()) {
    add(to_string(*change.after));
  }
  return text;
}

}  // namespace funcol
