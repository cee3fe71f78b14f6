#include "planner/mesh_change.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "layout/tensor_meta.h"

namespace funcol {
namespace {

// Returns the model of the common mesh: each axis costs what it costs as an axis of a view.
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
      add_cut(layout.order, placement.dim, axis);
    }
  }
  return layout;
}

// Returns `layout` with `axes`, which cut nothing, cutting a dim last: the first dim that all ranks share
// equally, else the longest. Returns nullopt if there are no dims or no axes.
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

// The bytes that ranks send each other in the steps of a plan. `ranks` are the ranks of the plan's mesh,
// `all` those of the matrix.
class PlanBytes {
 public:
  PlanBytes(const Plan& plan, const std::vector<int64_t>& ranks, const std::vector<int64_t>& all)
      : plan_(plan) {
    for (const int64_t rank : ranks) {
      places_.push_back(std::ranges::lower_bound(all, rank) - all.begin());
    }
    for (int64_t place = 0; place < plan.mesh.num_ranks(); ++place) {
      coordinates_.push_back(plan.mesh.coordinate(place));
    }
  }

  void add_to(std::vector<std::vector<int64_t>>& bytes) const {
    for (const auto& step : plan_.steps) {
      if (!communicates(step.kind)) {
        continue;
      }
      for (size_t from = 0; from < places_.size(); ++from) {
        for (size_t to = 0; to < places_.size(); ++to) {
          bytes[places_[from]][places_[to]] += from == to ? 0 : sent(step, from, to) * plan_.itemsize;
        }
      }
    }
  }

 private:
  // Returns the number of elements that one rank sends another.
  int64_t sent(const Step& step, size_t from, size_t to) const {
    for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
      // Of replicas, the one with the receiver's own coordinate sends.
      const bool is_same = !contains(step.axes, axis) || step.before.placements[axis].is_replicate();
      if (is_same && coordinates_[from][axis] != coordinates_[to][axis]) {
        return 0;
      }
    }
    int64_t elements = 1;
    for (size_t dim = 0; dim < plan_.shape.size(); ++dim) {
      elements *= num_common(held(step.before, dim, from), held(step.after, dim, to));
    }
    return step.kind == StepKind::kAllReduce ? 2 * elements / plan_.mesh.num_ranks(step.axes) : elements;
  }

  Intervals held(const Layout& layout, size_t dim, size_t rank) const {
    return local_indices(layout, plan_.mesh, static_cast<int64_t>(dim), plan_.shape[dim], coordinates_[rank]);
  }

  const Plan& plan_;
  std::vector<size_t> places_;
  std::vector<Coordinate> coordinates_;
};

// A plan on one mesh, within the bound on memory.
struct BoundedPlan {
  std::optional<Plan> plan;  // nullopt if no plan stays within the bound
  int64_t peak_bytes;        // of the plan, or the least that a plan takes, with the bytes held besides it
};

// The candidate plans of a change, compared by cost.
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
    const auto& mesh = task_.src_mesh.mesh;
    const auto partial = axes_where(mesh, task_.src, &Placement::is_partial);
    const auto reduced = with_placements(task_.src, partial, Placement::replicate());
    add_transfers(reduced);
    if (const auto scattered = with_shards(mesh, reduced, partial, task_.shape)) {
      add_transfers(*scattered);
    }
    add_on_common_mesh();
    if (!best_.has_value()) {
      refuse();
    }
    return *std::move(best_);
  }

 private:
  [[noreturn]] void refuse() const {
    if (least_peak_ == std::numeric_limits<int64_t>::max()) {
      throw std::invalid_argument(no_plan_reason_);
    }
    throw std::invalid_argument(
        "plan_mesh_change: no plan from " + to_string(task_.src) + " to " + to_string(task_.dst) +
        " stays within " + std::to_string(max_bytes_.value_or(0)) +
        " bytes a rank. The least that a plan takes is " + std::to_string(least_peak_) + ".");
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
    auto part = try_plan(common->mesh, *std::move(src), *std::move(dst), common_model(*common, models_), 0);
    if (part.has_value() && (!best_.has_value() || !part->plan.has_value() || sends_little(*part->plan))) {
      MeshChange change{task_, common, {}, {}, {}, 0, 0};
      change.before = add_part(*std::move(part), change);
      add(std::move(change));
    }
  }

  // Returns true if no rank sends more than the busiest one has to send in a transfer. For a small tensor the
  // cheapest plan may gather it on every rank; but many small tensors travel together.
  bool sends_little(const Plan& plan) const {
    int64_t sent = 0;
    for (const auto& step : plan.steps) {
      sent += step.bytes_sent;
    }
    return !bound_.has_value() || sent <= *bound_;
  }

  // Adds the plans that transfer the tensor as `src`.
  void add_transfers(const Layout& src) {
    MeshChange change{task_, {}, {}, {}, {}, 0, 0};
    if (src != task_.src) {
      auto part = try_plan(task_.src_mesh.mesh, task_.src, src, models_.src, 0);
      if (!part.has_value()) {
        return;
      }
      change.before = add_part(*std::move(part), change);
    }
    const auto& mesh = task_.dst_mesh.mesh;
    const auto partial = axes_where(mesh, task_.dst, &Placement::is_partial);
    const auto reduced = with_placements(task_.dst, partial, Placement::replicate());
    const bool waits_for_senders = add_transfer(change, src, reduced);
    if (!waits_for_senders && !max_bytes_.has_value()) {
      return;  // shards, which take less memory, cost no less
    }
    const auto replicated = axes_where(mesh, reduced, &Placement::is_replicate);
    if (const auto scattered = with_shards(mesh, reduced, replicated, task_.shape)) {
      add_transfer(std::move(change), src, *scattered);
    }
  }

  // Adds the plan with this transfer, if one exists. Returns true if the plan waits for senders: the busiest
  // sender sends more than the busiest receiver receives.
  bool add_transfer(MeshChange change, const Layout& src, const Layout& dst) {
    change.transfer = plan_transfer({task_.src_mesh, src, task_.dst_mesh, dst, task_.shape, task_.itemsize});
    const auto& loads = change.transfer->loads;
    if (src == task_.src && dst == task_.dst) {
      bound_ = loads.bound;
    }
    const bool waits_for_senders = loads.busiest_sender > loads.busiest_receiver;
    const int64_t kept = src != task_.src ? src_bytes_ : 0;
    change.cost += cost_of(loads);
    change.peak_bytes = std::max(change.peak_bytes, kept + loads.peak);
    if (dst != task_.dst) {
      auto part = try_plan(task_.dst_mesh.mesh, dst, task_.dst, models_.dst, src_bytes_);
      if (!part.has_value()) {
        return waits_for_senders;
      }
      change.after = add_part(*std::move(part), change);
    }
    add(std::move(change));
    return waits_for_senders;
  }

  double cost_of(const TransferLoads& loads) const {
    const auto all_axes = [](const RankedMesh& mesh) {
      return static_cast<AxisSet>((uint64_t{1} << mesh.mesh.sizes.size()) - 1);
    };
    StepSize step{loads.total == 0 ? StepKind::kSplit : StepKind::kPermute};
    step.bytes_full = std::max(loads.busiest_sender, loads.busiest_receiver);
    step.bytes_copied = loads.busiest_copier;
    const auto on = [&](const Costs& costs, const RankedMesh& mesh) {
      step.axes = all_axes(mesh);
      return costs.of(step);
    };
    return std::max(on(src_costs_, task_.src_mesh), on(dst_costs_, task_.dst_mesh));
  }

  // Plans a part while ranks hold `held` other bytes. Returns nullopt, and sets no_plan_reason_, if no plan
  // exists whatever the memory.
  std::optional<BoundedPlan> try_plan(const Mesh& mesh, Layout src, Layout dst, const CostModel& model,
                                      int64_t held) {
    const auto bound = max_bytes_.has_value() ? std::optional(*max_bytes_ - held) : std::nullopt;
    try {
      auto plan = plan_redistribution({mesh, task_.shape, task_.itemsize, std::move(src), std::move(dst)},
                                      model, bound);
      const int64_t peak_bytes = held + plan.peak_bytes;
      return BoundedPlan{std::move(plan), peak_bytes};
    } catch (const BeyondMemory& error) {
      return BoundedPlan{std::nullopt, held + error.least_bytes()};
    } catch (const std::invalid_argument& error) {
      no_plan_reason_ = error.what();
      return std::nullopt;
    }
  }

  // Adds the cost and the peak of a part to `change`, and returns its plan.
  static std::optional<Plan> add_part(BoundedPlan part, MeshChange& change) {
    change.cost += part.plan.has_value() ? part.plan->cost : 0;
    change.peak_bytes = std::max(change.peak_bytes, part.peak_bytes);
    return std::move(part.plan);
  }

  // Keeps the cheapest plan within the bound. A plan that lacks a part exceeds it, because that part does.
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
  std::optional<int64_t> bound_;  // the least that the busiest rank sends; nullopt where values are partial
  std::optional<MeshChange> best_;
  std::string no_plan_reason_;
  int64_t least_peak_ = std::numeric_limits<int64_t>::max();
};

}  // namespace

MeshChange plan_mesh_change(const MeshChangeTask& task, const MeshChangeCosts& models,
                            std::optional<int64_t> max_bytes) {
  return Candidates(task, models, max_bytes).best();
}

std::vector<std::vector<int64_t>> bytes_matrix(const MeshChange& change) {
  const auto ranks = all_ranks(change.task);
  std::vector<std::vector<int64_t>> bytes(ranks.size(), std::vector<int64_t>(ranks.size()));
  if (change.transfer.has_value()) {
    bytes = bytes_matrix(*change.transfer);
  }
  if (change.before.has_value()) {
    PlanBytes(*change.before, change.task.src_mesh.ranks, ranks).add_to(bytes);
  }
  if (change.after.has_value()) {
    PlanBytes(*change.after, change.task.dst_mesh.ranks, ranks).add_to(bytes);
  }
  return bytes;
}

std::optional<int64_t> least_busiest_bytes(const MeshChangeTask& task) {
  if (!axes_where(task.src_mesh.mesh, task.src, &Placement::is_partial).empty() ||
      !axes_where(task.dst_mesh.mesh, task.dst, &Placement::is_partial).empty()) {
    return std::nullopt;
  }
  return plan_transfer(task).loads.bound;
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
