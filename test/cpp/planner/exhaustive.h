// A slow reference for the least costs of redistributions to one layout, by visiting all layouts. It shares
// only the costs of steps with the search.
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "layout/shards.h"
#include "planner/search.h"

namespace funcol::test {

class Exhaustive {
 public:
  // Finds the costs from every layout of `sources`, and from all layouts on the way.
  Exhaustive(Redistribution to, const CostModel& model, const std::vector<Layout>& sources)
      : task_(std::move(to)), costs_(model, task_.mesh) {
    for (int64_t axis = 0; axis < task_.mesh.num_axes(); ++axis) {
      sets_.push_back({axis});
    }
    for (const AxisSet merged : task_.mesh.merged) {
      sets_.emplace_back();
      for (int64_t axis = 0; axis < task_.mesh.num_axes(); ++axis) {
        if (contains(merged, axis)) {
          sets_.back().push_back(axis);
        }
      }
    }
    for (const auto& layout : sources) {
      number_of(layout);
    }
    const int dst = number_of(task_.dst);
    size_t num_expanded = 0;
    while (num_expanded < layouts_.size()) {  // it grows on the way
      const Layout layout = layouts_[num_expanded++];
      expand(layout);
    }
    least_.assign(layouts_.size(), std::numeric_limits<double>::infinity());
    least_[dst] = 0;
    // Bellman-Ford.
    for (bool changed = true; changed;) {
      changed = false;
      for (const auto& edge : edges_) {
        if (edge.cost + least_[edge.to] < least_[edge.from]) {
          least_[edge.from] = edge.cost + least_[edge.to];
          changed = true;
        }
      }
    }
  }

  double cost_from(const Layout& src) { return least_.at(number_of(src)); }

 private:
  struct Edge {
    int from;
    int to;
    double cost;
  };
  using Axes = std::vector<int64_t>;  // from the first mesh axis to the last

  int number_of(const Layout& layout) {
    const auto [known, is_new] = numbers_.try_emplace(to_string(layout), static_cast<int>(layouts_.size()));
    if (is_new) {
      layouts_.push_back(layout);
    }
    return known->second;
  }

  void expand(const Layout& now) {
    for (const auto& axes : sets_) {
      if (all(axes, now, &Placement::is_partial)) {
        step(StepKind::kAllReduce, axes, now, changed(now, axes, Placement::replicate()));
        cut(StepKind::kReduceScatter, axes, now, -1);
      }
      if (axes.size() == 1 && all(axes, now, &Placement::is_replicate)) {
        cut(StepKind::kSplit, axes, now, -1);
        to_partial(StepKind::kToPartial, axes.front(), now);
      }
      const int64_t dim = dim_of_last_cuts(axes, now);
      if (dim >= 0) {
        step(StepKind::kAllGather, axes, now, changed(now, axes, Placement::replicate()));
        cut(StepKind::kAllToAll, axes, now, dim);
        // The average of a shard among zeros would not be the shard.
        if (axes.size() == 1 && task_.dst.placements[axes.front()].op != PartialOp::kAvg) {
          to_partial(StepKind::kEmbed, axes.front(), now);
        }
      }
      exchange(axes, now);
    }
  }

  static bool all(const Axes& axes, const Layout& layout, bool (Placement::*is)() const) {
    return std::ranges::all_of(axes, [&](int64_t axis) { return (layout.placements[axis].*is)(); });
  }

  static bool has(const Axes& axes, int64_t axis) { return std::ranges::find(axes, axis) != axes.end(); }

  // The dim whose last cuts are made by exactly these axes; -1 if there is none.
  static int64_t dim_of_last_cuts(const Axes& axes, const Layout& layout) {
    if (!all(axes, layout, &Placement::is_shard)) {
      return -1;
    }
    const int64_t dim = layout.placements[axes.front()].dim;
    const auto& cuts = layout.axes_of(dim);
    const bool last =
        cuts.size() >= axes.size() && std::all_of(cuts.end() - static_cast<std::ptrdiff_t>(axes.size()),
                                                  cuts.end(), [&](int64_t axis) { return has(axes, axis); });
    return last ? dim : -1;
  }

  // The axes take the placement in this order. Shards come after the present cuts of the dim.
  static Layout changed(Layout layout, const Axes& axes, const Placement& placement) {
    for (auto& cuts : layout.order) {
      std::erase_if(cuts, [&](int64_t axis) { return has(axes, axis); });
    }
    for (const int64_t axis : axes) {
      layout.placements[axis] = placement;
      if (placement.is_shard()) {
        add_cut(layout.order, placement.dim, axis);
      }
    }
    return layout;
  }

  void cut(StepKind kind, const Axes& axes, const Layout& now, int64_t except) {
    for (int64_t dim = 0; dim < static_cast<int64_t>(task_.shape.size()); ++dim) {
      if (dim == except) {
        continue;
      }
      Axes order = axes;
      do {
        step(kind, axes, now, changed(now, order, Placement::shard(dim)));
      } while (std::ranges::next_permutation(order).found);
      const auto& wanted = task_.dst.placements[axes.front()];
      if (axes.size() == 1 && wanted.is_shard() && wanted.dim == dim && wanted.split_factor != 1) {
        step(kind, axes, now, changed(now, axes, wanted));
      }
    }
  }

  void to_partial(StepKind kind, int64_t axis, const Layout& now) {
    const auto& wanted = task_.dst.placements[axis];
    const bool commutes = std::ranges::all_of(now.placements, [&](const auto& other) {
      return !other.is_partial() || commute(other.op, wanted.op);
    });
    if (wanted.is_partial() && commutes) {
      step(kind, {axis}, now, changed(now, {axis}, wanted));
    }
  }

  // The axes take their placements in dst at once, after the cuts by other axes.
  void exchange(const Axes& axes, const Layout& now) {
    Layout next = now;
    for (const auto& cuts : now.order) {
      const auto is_ours = [&](int64_t axis) { return has(axes, axis); };
      if (std::find_if_not(std::ranges::find_if(cuts, is_ours), cuts.end(), is_ours) != cuts.end()) {
        return;  // another axis cuts behind one of these
      }
    }
    next = changed(next, axes, Placement::replicate());
    for (size_t dim = 0; dim < task_.shape.size(); ++dim) {
      for (const int64_t axis : task_.dst.axes_of(static_cast<int64_t>(dim))) {
        if (has(axes, axis)) {
          next = changed(next, {axis}, task_.dst.placements[axis]);
        }
      }
    }
    const bool sharded = all(axes, now, &Placement::is_shard) && all(axes, task_.dst, &Placement::is_shard);
    const bool one = axes.size() == 1;
    if (std::ranges::any_of(axes,
                            [&](int64_t axis) {
                              return now.placements[axis].is_partial() ||
                                     task_.dst.placements[axis].is_partial();
                            }) ||
        (one && (!sharded || next.placements[axes.front()].dim != now.placements[axes.front()].dim))) {
      return;
    }
    if (same_blocks(axes, now, next)) {
      step(StepKind::kPermute, axes, now, next);
    } else if (sharded) {
      step(StepKind::kAllToAll, axes, now, next);
    }
  }

  // Returns true if the axes cut every dim into equal blocks, and into equally many before and after.
  bool same_blocks(const Axes& axes, const Layout& before, const Layout& after) const {
    for (size_t dim = 0; dim < task_.shape.size(); ++dim) {
      const auto [ours_before, all_before, plain_before] = num_blocks(axes, before, dim);
      const auto [ours_after, all_after, plain_after] = num_blocks(axes, after, dim);
      const bool touched = ours_before != 1 || ours_after != 1;
      if (touched && (ours_before != ours_after || !plain_before || !plain_after ||
                      task_.shape[dim] % all_before != 0 || all_before != all_after)) {
        return false;
      }
    }
    return true;
  }

  std::tuple<int64_t, int64_t, bool> num_blocks(const Axes& axes, const Layout& layout, size_t dim) const {
    int64_t ours = 1;
    int64_t total = 1;
    bool plain = true;
    for (const int64_t axis : layout.axes_of(static_cast<int64_t>(dim))) {
      ours *= has(axes, axis) ? task_.mesh.sizes[axis] : 1;
      total *= task_.mesh.sizes[axis];
      plain = plain && layout.placements[axis].split_factor == 1;
    }
    return {ours, total, plain};
  }

  void step(StepKind kind, const Axes& axes, const Layout& before, const Layout& after) {
    const int from = number_of(before);
    const int to = number_of(after);
    if (from != to) {
      edges_.push_back({from, to, costs_.of(size_of(kind, axes, before, after))});
    }
  }

  StepSize size_of(StepKind kind, const Axes& axes, const Layout& before, const Layout& after) const {
    StepSize size{kind, 0, bytes(before), bytes(after), 0, 0};
    int64_t num_ranks = 1;
    for (const int64_t axis : axes) {
      size.axes |= axis_set(axis);
      num_ranks *= task_.mesh.sizes[axis];
    }
    const auto& from = before.placements[axes.front()];
    const auto& to = after.placements[axes.front()];
    switch (kind) {
      case StepKind::kAllGather:
        size.bytes_full = std::max(num_ranks * size.bytes_before, size.bytes_after);
        size.bytes_copied = even(before, axes, from.dim) && is_first(before, from.dim) ? 0 : size.bytes_after;
        break;
      case StepKind::kReduceScatter:
        size.bytes_full = std::max(num_ranks * size.bytes_after, size.bytes_before);
        size.bytes_copied = even(after, axes, to.dim) && is_first(after, to.dim) ? 0 : size.bytes_before;
        break;
      case StepKind::kAllReduce:
        size.bytes_full = size.bytes_before;
        break;
      case StepKind::kPermute:
      case StepKind::kAllToAll: {
        size.bytes_full = std::max(size.bytes_before, size.bytes_after);
        if (kind == StepKind::kPermute) {
          break;
        }
        const bool one_dim_each = std::ranges::all_of(axes, [&](int64_t axis) {
          return before.placements[axis].dim == from.dim && after.placements[axis].dim == to.dim;
        });
        const bool blocks =
            one_dim_each && from.dim != to.dim && even(before, axes, from.dim) && even(after, axes, to.dim);
        size.bytes_copied += blocks && is_first(before, to.dim) ? 0 : size.bytes_before;
        size.bytes_copied += blocks && is_first(after, from.dim) ? 0 : size.bytes_after;
        break;
      }
      default:
        size.bytes_copied = size.bytes_after;
    }
    return size;
  }

  std::vector<int64_t> first_rank(const Layout& layout) const {
    return local_shape(layout, task_.mesh, task_.shape, Coordinate(task_.mesh.sizes.size(), 0));
  }

  int64_t bytes(const Layout& layout) const {
    int64_t product = task_.itemsize;
    for (const int64_t size : first_rank(layout)) {
      product *= size;
    }
    return product;
  }

  // Returns true if all dims before `dim` have size 1.
  bool is_first(const Layout& layout, int64_t dim) const {
    const auto shape = first_rank(layout);
    return std::all_of(shape.begin(), shape.begin() + dim, [](int64_t size) { return size == 1; });
  }

  // Returns true if the axes cut `dim` in mesh order and into equal blocks.
  bool even(const Layout& layout, const Axes& axes, int64_t dim) const {
    int64_t size = task_.shape[dim];
    int64_t last = -1;
    for (const int64_t axis : layout.axes_of(dim)) {
      const int64_t num_ranks = task_.mesh.sizes[axis];
      if (has(axes, axis)) {
        if (layout.placements[axis].split_factor != 1 || axis < last || size % num_ranks != 0) {
          return false;
        }
        last = axis;
      }
      size = longest_shard(size, num_ranks, layout.placements[axis].split_factor);
    }
    return true;
  }

  const Redistribution task_;
  const Costs costs_;
  std::vector<Axes> sets_;
  std::vector<Layout> layouts_;
  std::map<std::string, int> numbers_;
  std::vector<Edge> edges_;
  std::vector<double> least_;
};

}  // namespace funcol::test
