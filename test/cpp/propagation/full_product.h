// A slow reference for cheapest_composition(): writes out the full product of the rows. It shares only the
// costs of redistributions with the engine.
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/search.h"
#include "propagation/composition_search.h"

namespace funcol::test {

class FullProduct {
 public:
  struct Priced {
    Composition composition;
    std::vector<double> costs;

    double total() const { return std::accumulate(costs.begin(), costs.end(), 0.0); }
  };

  FullProduct(OpCall call, Rows rows, Mesh mesh, std::vector<Operand> operands,
              std::vector<std::optional<Layout>> required, CostModel model)
      : call_(std::move(call)),
        rows_(std::move(rows)),
        mesh_(std::move(mesh)),
        operands_(std::move(operands)),
        required_(std::move(required)),
        model_(std::move(model)) {
    write_out();
  }

  const std::vector<Priced>& all() const { return all_; }

  // The first preferred composition; nullptr if there is none.
  const Priced* preferred() const {
    for (const auto& priced : all_) {
      if (is_unmoved(priced)) {
        return &priced;
      }
    }
    const Priced* least = nullptr;
    for (const auto& priced : all_) {
      if (least == nullptr || priced.total() < least->total()) {
        least = &priced;
      }
    }
    return least;
  }

  bool is_unmoved(const Priced& priced) const {
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (priced.composition.inputs[i] != operands_[i].source) {
        return false;
      }
    }
    return true;
  }

 private:
  using Axes = std::vector<int64_t>;

  void write_out() {
    expand_rows();
    const auto precedences = all_precedences();
    std::vector<size_t> numbers(mesh_.sizes.size(), 0);
    while (true) {
      std::vector<Composition> seen;
      for (const auto& precedence : precedences) {
        auto composition = compose(numbers, precedence);
        if (std::ranges::find(seen, composition) == seen.end()) {
          seen.push_back(composition);
          add(std::move(composition));
        }
      }
      size_t axis = numbers.size();
      while (axis > 0 && ++numbers[axis - 1] == expanded_.size()) {
        numbers[--axis] = 0;
      }
      if (axis == 0) {
        return;
      }
    }
  }

  void expand_rows() {
    std::vector<int64_t> factors{1};
    for (const auto& operand : operands_) {
      for (const auto& placement : operand.source.placements) {
        if (std::ranges::find(factors, placement.split_factor) == factors.end()) {
          factors.push_back(placement.split_factor);
        }
      }
    }
    Row replicated;
    replicated.inputs.resize(call_.tensors.size());
    replicated.outputs.resize(call_.outputs.size(), Placement::replicate());
    expanded_.push_back(replicated);
    for (const auto& row : rows_.rows) {
      for (const int64_t factor : factors) {
        Row plain = row;
        for (auto& placement : plain.inputs) {
          placement.split_factor = placement.split_factor == kAnySplit ? factor : placement.split_factor;
        }
        for (auto& placement : plain.outputs) {
          placement->split_factor = placement->split_factor == kAnySplit ? factor : placement->split_factor;
        }
        if (factor == 1 || plain != row) {
          expanded_.push_back(plain);
        }
      }
    }
  }

  // The lexicographically first permutation that agrees with the orders.
  std::optional<Axes> precedence_of(const std::vector<ShardOrder>& orders) const {
    Axes axes(mesh_.sizes.size());
    std::iota(axes.begin(), axes.end(), 0);
    do {
      if (std::ranges::all_of(orders, [&](const auto& order) { return keeps_to(axes, order); })) {
        return axes;
      }
    } while (std::ranges::next_permutation(axes).found);
    return std::nullopt;
  }

  static bool keeps_to(const Axes& axes, const ShardOrder& order) {
    for (const auto& cuts : order) {
      for (size_t i = 1; i < cuts.size(); ++i) {
        if (std::ranges::find(axes, cuts[i - 1]) > std::ranges::find(axes, cuts[i])) {
          return false;
        }
      }
    }
    return true;
  }

  std::vector<Axes> all_precedences() const {
    std::vector<ShardOrder> orders;
    orders.reserve(operands_.size());
    for (const auto& operand : operands_) {
      orders.push_back(operand.source.order);
    }
    for (const auto& layout : required_) {
      if (layout) {
        orders.push_back(layout->order);
      }
    }
    std::vector<Axes> precedences{*precedence_of({})};
    const auto add = [&](const std::optional<Axes>& precedence) {
      if (precedence && std::ranges::find(precedences, *precedence) == precedences.end()) {
        precedences.push_back(*precedence);
      }
    };
    add(precedence_of(orders));
    for (const auto& order : orders) {
      add(precedence_of({order}));
    }
    return precedences;
  }

  Composition compose(const std::vector<size_t>& numbers, const Axes& precedence) const {
    Composition composition;
    const auto finish = [&](Layout& layout) {
      for (const int64_t axis : precedence) {
        const auto& placement = layout.placements[axis];
        if (placement.is_shard()) {
          add_cut(layout.order, placement.dim, axis);
        }
      }
    };
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      Layout& layout = composition.inputs.emplace_back();
      for (const size_t number : numbers) {
        layout.placements.push_back(expanded_[number].inputs[i]);
      }
      finish(layout);
    }
    for (size_t i = 0; i < call_.outputs.size(); ++i) {
      Layout layout;
      for (const size_t number : numbers) {
        layout.placements.push_back(*expanded_[number].outputs[i]);
      }
      finish(layout);
      composition.outputs.emplace_back(std::move(layout));
    }
    return composition;
  }

  void add(Composition composition) {
    if (!is_legal(composition)) {
      return;
    }
    Priced& priced = all_.emplace_back();
    for (size_t i = 0; i < operands_.size(); ++i) {
      priced.costs.push_back(cost(i, composition.inputs[i]));
    }
    priced.composition = std::move(composition);
  }

  bool is_legal(const Composition& composition) const {
    for (size_t i = 0; i < operands_.size(); ++i) {
      const Layout& layout = composition.inputs[i];
      if (mixes(layout) || (!rows_.allows_empty_shards && has_empty_rank(layout, call_.tensors[i].shape)) ||
          (operands_[i].is_pinned && layout != operands_[i].source) || makes_partials(i, layout)) {
        return false;
      }
    }
    for (size_t i = 0; i < composition.outputs.size(); ++i) {
      if (mixes(*composition.outputs[i]) ||
          (!required_.empty() && required_[i] && composition.outputs[i] != required_[i])) {
        return false;
      }
    }
    return !rows_.is_legal || rows_.is_legal(call_, composition, mesh_);
  }

  bool mixes(const Layout& layout) const {
    for (size_t a = 0; a < layout.placements.size(); ++a) {
      for (size_t b = 0; b < a; ++b) {
        const auto& one = layout.placements[a];
        const auto& other = layout.placements[b];
        const bool disagree = one.is_partial() && other.is_partial() && !commute(one.op, other.op);
        if ((disagree && mesh_.sizes[a] > 1 && mesh_.sizes[b] > 1) || (one.mask != 0 && other.mask != 0)) {
          return true;
        }
      }
    }
    return false;
  }

  bool has_empty_rank(const Layout& layout, const std::vector<int64_t>& shape) const {
    for (size_t dim = 0; dim < layout.order.size(); ++dim) {
      for (const auto& coordinate : coordinates(mesh_)) {
        const auto indices =
            naive_local_indices(layout, mesh_, static_cast<int64_t>(dim), shape[dim], coordinate);
        if (!layout.order[dim].empty() && indices.empty()) {
          return true;
        }
      }
    }
    return false;
  }

  bool makes_partials(size_t input, const Layout& layout) const {
    for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
      const auto& source = operands_[input].source.placements[axis];
      const auto& target = layout.placements[axis];
      if (target.is_partial() && target != source && !source.is_replicate()) {
        return true;
      }
    }
    return false;
  }

  double cost(size_t input, const Layout& target) {
    const auto key = std::pair(input, to_string(target));
    const auto known = known_.find(key);
    if (known != known_.end()) {
      return known->second;
    }
    const auto& tensor = call_.tensors[input];
    const Redistribution task{mesh_, tensor.shape, itemsize(tensor.dtype), operands_[input].source, target};
    return known_[key] = plan_redistribution(task, model_).cost;
  }

  const OpCall call_;
  const Rows rows_;
  const Mesh mesh_;
  const std::vector<Operand> operands_;
  const std::vector<std::optional<Layout>> required_;
  const CostModel model_;
  std::vector<Row> expanded_;
  std::map<std::pair<size_t, std::string>, double> known_;
  std::vector<Priced> all_;
};

}  // namespace funcol::test
