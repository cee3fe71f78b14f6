// Redistributions to plan: from a text, at random, or all of one kind.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "layout/layout.h"
#include "planner/search.h"

namespace funcol::test {

struct Sides {
  std::string placements;
  ShardOrder order = {};
};

inline Layout layout_of(const Sides& sides, const Mesh& mesh, size_t num_dims) {
  return make_layout("test", parse_placements(sides.placements), sides.order, mesh,
                     static_cast<int64_t>(num_dims));
}

inline Redistribution task_of(const Mesh& mesh, const std::vector<int64_t>& shape, const Sides& src,
                              const Sides& dst, int64_t itemsize = 4) {
  return {mesh, shape, itemsize, layout_of(src, mesh, shape.size()), layout_of(dst, mesh, shape.size())};
}

// Every set of two or more axes.
inline std::vector<AxisSet> all_merged(size_t num_axes) {
  std::vector<AxisSet> merged;
  for (AxisSet axes = 1; axes < AxisSet{1} << num_axes; ++axes) {
    if (funcol::num_axes(axes) > 1) {
      merged.push_back(axes);
    }
  }
  return merged;
}

// A host of fast links: the first axis is slow, the others are not.
inline AlphaBeta slow_first_axis(const Mesh& mesh) {
  AlphaBeta model = default_alpha_beta(mesh);
  AxisCost& axis = model.axes.front();
  for (LinkCost* link :
       {&axis.all_gather, &axis.reduce_scatter, &axis.all_reduce, &axis.all_to_all, &axis.permute}) {
    link->latency_us *= 3;
    link->us_per_byte *= 5;
  }
  return model;
}

// Every layout whose axes are one of `choices` each, in every shard order.
inline std::vector<Layout> all_layouts(const Mesh& mesh, const std::vector<Placement>& choices) {
  std::vector<Layout> layouts{{}};
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    std::vector<Layout> longer;
    for (const auto& layout : layouts) {
      for (const auto& choice : choices) {
        Layout next = layout;
        next.placements.push_back(choice);
        if (!choice.is_shard()) {
          longer.push_back(next);
          continue;
        }
        const auto dim = static_cast<size_t>(choice.dim);
        next.order.resize(std::max(next.order.size(), dim + 1));
        for (size_t place = 0; place <= next.order[dim].size(); ++place) {
          longer.push_back(next);
          auto& cuts = longer.back().order[dim];
          cuts.insert(cuts.begin() + static_cast<std::ptrdiff_t>(place), axis);
        }
      }
    }
    layouts = std::move(longer);
  }
  return layouts;
}

struct RandomLimits {
  int64_t min_axes = 1;
  int64_t max_axes = 4;
  int64_t min_dims = 1;
  int64_t max_dims = 4;
  std::vector<int64_t> axis_sizes = {1, 2, 2, 3, 4};
  bool default_orders = false;
  bool strided = true;
  bool one_op = false;  // the partials of both layouts reduce alike
};

// A random task. Its numbers depend on the seed alone, not on the standard library.
class RandomTask {
 public:
  RandomTask(uint32_t seed, RandomLimits limits) : random_(seed), limits_(std::move(limits)) {}

  Redistribution make() {
    Redistribution task;
    const auto num_axes = limits_.min_axes + below(limits_.max_axes - limits_.min_axes + 1);
    for (int64_t axis = 0; axis < num_axes; ++axis) {
      task.mesh.sizes.push_back(one_of(limits_.axis_sizes));
    }
    for (const AxisSet axes : all_merged(task.mesh.sizes.size())) {
      if (below(4) == 0) {
        task.mesh.merged.push_back(axes);
      }
    }
    const auto num_dims = limits_.min_dims + below(limits_.max_dims - limits_.min_dims + 1);
    for (int64_t dim = 0; dim < num_dims; ++dim) {
      task.shape.push_back(one_of<int64_t>({0, 1, 2, 3, 5, 7, 8, 8, 12, 12}));
    }
    task.itemsize = one_of<int64_t>({1, 4, 1 << 16});
    task.src = layout(task.mesh, num_dims);
    task.dst = layout(task.mesh, num_dims);
    return task;
  }

  CostModel model(const Mesh& mesh) {
    switch (below(3)) {
      case 0:
        return StepCounts{};
      case 1:
        return default_alpha_beta(mesh);
      default:
        return slow_first_axis(mesh);
    }
  }

 private:
  int64_t below(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint32_t>(end)); }

  template <typename T>
  T one_of(const std::vector<T>& choices) {
    return choices[below(static_cast<int64_t>(choices.size()))];
  }

  PartialOp any_op() {
    return one_of<PartialOp>({PartialOp::kSum, PartialOp::kSum, PartialOp::kAvg, PartialOp::kMax});
  }

  Layout layout(const Mesh& mesh, int64_t num_dims) {
    if (!limits_.one_op) {
      op_ = any_op();
    }
    std::vector<Placement> placements;
    for (size_t axis = 0; axis < mesh.sizes.size(); ++axis) {
      const auto choice = below(10);
      const bool strided = limits_.strided && below(8) == 0;
      placements.push_back(choice < 2   ? Placement::partial(op_)
                           : choice < 4 ? Placement::replicate()
                                        : Placement::shard(below(num_dims), strided ? 2 : 1));
    }
    ShardOrder order = default_shard_order(placements);
    for (auto& cuts : order) {
      for (size_t i = cuts.size(); i > 1 && !limits_.default_orders; --i) {
        std::swap(cuts[i - 1], cuts[below(static_cast<int64_t>(i))]);
      }
    }
    return make_layout("test", placements, order, mesh, num_dims);
  }

  std::mt19937 random_;
  RandomLimits limits_;
  PartialOp op_ = any_op();
};

inline std::string described(const Redistribution& task) {
  std::string text = to_string(task.src) + " -> " + to_string(task.dst) + ", mesh";
  for (const int64_t size : task.mesh.sizes) {
    text += " " + std::to_string(size);
  }
  text += ", shape";
  for (const int64_t size : task.shape) {
    text += " " + std::to_string(size);
  }
  text += ", itemsize " + std::to_string(task.itemsize) + ", merged";
  for (const AxisSet axes : task.mesh.merged) {
    text += " " + std::to_string(axes);
  }
  return text;
}

}  // namespace funcol::test
