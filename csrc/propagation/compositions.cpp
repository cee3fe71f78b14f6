#include "propagation/compositions.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "layout/shards.h"

namespace funcol {
namespace {

bool is_no_replicate(const Placement& placement) { return !placement.is_replicate(); }

bool may_mix(const Placement& a, const Placement& b) {
  return !a.is_partial() || !b.is_partial() || commute(a, b);
}

// Returns true unless both have masks, which exclude each other even on axes of one rank.
bool have_one_mask(const Placement& a, const Placement& b) { return a.mask == 0 || b.mask == 0; }

bool is_same_placement(const Placement& a, const Placement& b) {
  return a.mask != 0 && b.mask != 0 ? a.op == b.op : a == b;
}

// Returns true if the row has the placements of a composition on this axis. Outputs without a tensor are
// ignored.
bool matches_placements(const Row& row, const Composition& wanted, size_t axis, const OpCall& call) {
  for (size_t i = 0; i < row.inputs.size(); ++i) {
    if (!is_same_placement(row.inputs[i], wanted.inputs[i].placements[axis])) {
      return false;
    }
  }
  for (size_t i = 0; i < row.outputs.size(); ++i) {
    const auto& output = row.outputs[i];
    const auto& layout = wanted.outputs[i];
    if (call.outputs[i] && (output.has_value() != layout.has_value() ||
                            (output && !is_same_placement(*output, layout->placements[axis])))) {
      return false;
    }
  }
  return true;
}

// Returns the first order of all axes, by mesh order, that agrees with all of `orders`. Returns nullopt if
// they contradict each other.
std::optional<Compositions::Precedence> sorted_by(const std::vector<const ShardOrder*>& orders,
                                                  int64_t num_axes) {
  std::vector<AxisSet> before(num_axes, 0);
  for (const auto* order : orders) {
    for (const auto& axes : *order) {
      for (size_t i = 1; i < axes.size(); ++i) {
        before[axes[i]] |= axis_set(axes[i - 1]);
      }
    }
  }
  Compositions::Precedence precedence;
  AxisSet done = 0;
  while (static_cast<int64_t>(precedence.size()) < num_axes) {
    int64_t axis = 0;
    while (axis < num_axes && (contains(done, axis) || (before[axis] & ~done) != 0)) {
      ++axis;
    }
    if (axis == num_axes) {
      return std::nullopt;
    }
    precedence.push_back(axis);
    done |= axis_set(axis);
  }
  return precedence;
}

[[noreturn]] void refuse(const OpCall& call, const std::string& why) {
  throw std::invalid_argument(call.op + ": " + why);
}

}  // namespace

bool is_cut_by(const Layout& layout, const Compositions::Precedence& precedence) {
  return std::ranges::all_of(layout.order, [&](const auto& axes) {
    return std::ranges::is_sorted(
        axes, {}, [&](int64_t axis) { return std::ranges::find(precedence, axis) - precedence.begin(); });
  });
}

Compositions::Compositions(const OpCall& call, const Rows& rows, const Mesh& mesh,
                           const std::vector<Operand>& operands,
                           const std::vector<std::optional<Layout>>& required)
    : call_(call), given_(rows), mesh_(mesh), operands_(operands), required_(required) {
  check_numbers();
  add_rows(rows.rows);
  rows_of_.resize(mesh.num_axes());
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    for (RowNumber number = 0; number < num_rows(); ++number) {
      if (is_allowed(row(number), axis)) {
        rows_of_[axis].push_back(number);
      }
    }
  }
  for (const auto* const row : rows_) {
    has_partials_.push_back(has_partials(*row));
  }
  find_precedences();
  find_groups();
}

void Compositions::check_numbers() const {
  const auto check = [&](size_t got, size_t expected, const char* what) {
    if (got != expected) {
      refuse(call_, std::to_string(got) + " " + what + "; expected " + std::to_string(expected) + ".");
    }
  };
  check(operands_.size(), call_.tensors.size(), "operands for the tensors of the call");
  if (!required_.empty()) {
    check(required_.size(), call_.outputs.size(), "required layouts for the outputs of the call");
  }
  for (const auto& row : given_.rows) {
    check(row.inputs.size(), call_.tensors.size(), "inputs in a row of its rule");
    check(row.outputs.size(), call_.outputs.size(), "outputs in a row of its rule");
  }
  for (const auto& operand : operands_) {
    check(operand.source.placements.size(), mesh_.sizes.size(), "placements of an operand on this mesh");
  }
  for (const auto& layout : required_) {
    if (layout) {
      check(layout->placements.size(), mesh_.sizes.size(), "placements of a required layout on this mesh");
    }
  }
}

void Compositions::add_rows(const std::vector<Row>& rows) {
  std::vector<int64_t> split_factors{1};
  for (const auto& operand : operands_) {
    for (const auto& placement : operand.source.placements) {
      if (std::ranges::find(split_factors, placement.split_factor) == split_factors.end()) {
        split_factors.push_back(placement.split_factor);
      }
    }
  }
  Row replicated;
  replicated.inputs.resize(call_.tensors.size());
  for (const auto& output : call_.outputs) {
    replicated.outputs.push_back(output ? std::optional(Placement::replicate()) : std::nullopt);
  }
  made_.push_back(std::move(replicated));
  rows_.push_back(&made_.back());
  for (const auto& row : rows) {
    if (any_placement(row, is_no_replicate) && has_all_dims(row)) {
      add_row(row, split_factors);
    }
  }
}

void Compositions::add_row(const Row& row, const std::vector<int64_t>& split_factors) {
  if (any_placement(row, is_any_mask)) {
    return add_masked(row);
  }
  if (!any_placement(row, is_any_shard)) {
    rows_.push_back(&row);
    return;
  }
  for (const int64_t factor : split_factors) {
    made_.push_back(with_split_factor(row, factor));
    rows_.push_back(&made_.back());
  }
}

void Compositions::add_masked(const Row& row) {
  std::vector<Placement> added;
  for (const auto& operand : operands_) {
    for (const auto& placement : operand.source.placements) {
      if (placement.mask != 0 && std::ranges::find(added, placement) == added.end()) {
        added.push_back(placement);
        made_.push_back(with_mask(row, placement));
        rows_.push_back(&made_.back());
      }
    }
  }
}

bool Compositions::has_all_dims(const Row& row) const {
  const auto has_dim = [](const Placement& placement, const TensorMeta& tensor) {
    return !placement.is_shard() || (placement.dim >= 0 && placement.dim < tensor.num_dims());
  };
  for (size_t i = 0; i < row.inputs.size(); ++i) {
    if (!has_dim(row.inputs[i], call_.tensors[i])) {
      return false;
    }
  }
  for (size_t i = 0; i < row.outputs.size(); ++i) {
    const auto& placement = row.outputs[i];
    const auto& tensor = call_.outputs[i];
    if (placement && tensor && !has_dim(*placement, *tensor)) {
      return false;
    }
  }
  return true;
}

bool Compositions::is_allowed(const Row& row, int64_t axis) const {
  for (size_t i = 0; i < operands_.size(); ++i) {
    const auto& from = operands_[i].source.placements[axis];
    const auto& to = row.inputs[i];
    const bool can_be_made = !to.is_partial() || from.is_replicate();
    if (from != to && (operands_[i].is_pinned || !can_be_made)) {
      return false;
    }
  }
  for (size_t i = 0; i < required_.size(); ++i) {
    const auto& required = required_[i];
    if (required && row.outputs[i] != required->placements[axis]) {
      return false;
    }
  }
  return true;
}

bool Compositions::mix(RowNumber a, RowNumber b, bool has_single_rank) const {
  return !has_partials_[a] || !has_partials_[b] ||
         (all_placements(row(a), row(b), have_one_mask) &&
          (has_single_rank || all_placements(row(a), row(b), may_mix)));
}

void Compositions::find_precedences() {
  Precedence of_mesh(mesh_.num_axes());
  std::iota(of_mesh.begin(), of_mesh.end(), 0);
  precedences_.push_back(of_mesh);
  std::vector<const ShardOrder*> orders;
  bool all_default = true;
  const auto add_order = [&](const Layout& layout) {
    all_default = all_default && is_default(layout.order);
    if (std::ranges::none_of(orders, [&](const auto* other) { return *other == layout.order; })) {
      orders.push_back(&layout.order);
    }
  };
  for (const auto& operand : operands_) {
    add_order(operand.source);
  }
  for (const auto& layout : required_) {
    if (layout) {
      add_order(*layout);
    }
  }
  if (all_default) {
    return;
  }
  const auto add = [&](const std::vector<const ShardOrder*>& implied_by) {
    auto precedence = sorted_by(implied_by, mesh_.num_axes());
    if (precedence && std::ranges::find(precedences_, *precedence) == precedences_.end()) {
      precedences_.push_back(std::move(*precedence));
    }
  };
  add(orders);
  for (const auto* order : orders) {
    add({order});
  }
  // Layouts of pinned operands, and required layouts, fix the order.
  std::erase_if(precedences_, [&](const Precedence& precedence) {
    return std::ranges::any_of(operands_,
                               [&](const auto& operand) {
                                 return operand.is_pinned && !is_cut_by(operand.source, precedence);
                               }) ||
           std::ranges::any_of(required_,
                               [&](const auto& layout) { return layout && !is_cut_by(*layout, precedence); });
  });
}

void Compositions::find_groups() {
  const auto is_same_input = [&](size_t a, size_t b) {
    return call_.tensors[a].shape == call_.tensors[b].shape &&
           call_.tensors[a].dtype == call_.tensors[b].dtype &&
           operands_[a].is_pinned == operands_[b].is_pinned && operands_[a].source == operands_[b].source &&
           std::ranges::all_of(rows_, [&](const Row* row) { return row->inputs[a] == row->inputs[b]; });
  };
  for (size_t input = 0; input < operands_.size(); ++input) {
    const auto known =
        std::ranges::find_if(groups_, [&](const Group& group) { return is_same_input(group.first, input); });
    group_of_.push_back(known - groups_.begin());
    if (known == groups_.end()) {
      groups_.push_back({input, 1});
    } else {
      ++known->num_inputs;
    }
  }
}

bool Compositions::may_follow(RowNumbers rows, RowNumber next) const {
  const auto axis = static_cast<int64_t>(rows.size());
  for (int64_t other = 0; other < axis; ++other) {
    const bool has_single_rank = mesh_.sizes[axis] == 1 || mesh_.sizes[other] == 1;
    if (!mix(rows[other], next, has_single_rank)) {
      return false;
    }
  }
  if (given_.allows_empty_shards) {
    return true;
  }
  // A dim must have at least one index for each rank that cuts it.
  return std::ranges::all_of(groups_, [&](const Group& group) {
    const auto& placement = row(next).inputs[group.first];
    if (!placement.is_shard()) {
      return true;
    }
    int64_t num_ranks = mesh_.sizes[axis];
    for (int64_t other = 0; other < axis; ++other) {
      const auto& before = row(rows[other]).inputs[group.first];
      num_ranks *= before.is_shard() && before.dim == placement.dim ? mesh_.sizes[other] : 1;
    }
    return num_ranks <= call_.tensors[group.first].shape[placement.dim];
  });
}

Composition Compositions::composition(RowNumbers rows, const Precedence& precedence) const {
  const auto layout_of = [&](auto placement_on) {
    Layout layout;
    layout.placements.reserve(rows.size());
    for (const RowNumber number : rows) {
      layout.placements.push_back(placement_on(row(number)));
    }
    for (const int64_t axis : precedence) {
      if (layout.placements[axis].is_shard()) {
        add_cut(layout.order, layout.placements[axis].dim, axis);
      }
    }
    return layout;
  };
  Composition composition;
  composition.inputs.reserve(call_.tensors.size());
  for (size_t i = 0; i < call_.tensors.size(); ++i) {
    composition.inputs.push_back(layout_of([i](const Row& row) { return row.inputs[i]; }));
  }
  for (size_t i = 0; i < call_.outputs.size(); ++i) {
    const bool all =
        std::ranges::all_of(rows, [&](RowNumber number) { return row(number).outputs[i].has_value(); });
    composition.outputs.push_back(
        all ? std::optional(layout_of([i](const Row& row) { return *row.outputs[i]; })) : std::nullopt);
  }
  return composition;
}

bool Compositions::is_legal(const Composition& composition) const {
  const auto has_no_empty_shard = [&](const Group& group) {
    const auto& shape = call_.tensors[group.first].shape;
    for (int64_t dim = 0; dim < std::ssize(shape); ++dim) {
      if (!leaves_none_empty(composition.inputs[group.first], mesh_, dim, shape[dim])) {
        return false;
      }
    }
    return true;
  };
  return (given_.allows_empty_shards || std::ranges::all_of(groups_, has_no_empty_shard)) &&
         (!given_.is_legal || given_.is_legal(call_, composition, mesh_));
}

bool Compositions::moves(const Composition& composition) const {
  for (size_t i = 0; i < operands_.size(); ++i) {
    if (composition.inputs[i] != operands_[i].source) {
      return true;
    }
  }
  return false;
}

std::optional<Composition> Compositions::unmoved() const {
  std::vector<const Precedence*> fitting;
  for (const auto& precedence : precedences_) {
    if (std::ranges::all_of(operands_,
                            [&](const auto& operand) { return is_cut_by(operand.source, precedence); })) {
      fitting.push_back(&precedence);
    }
  }
  if (fitting.empty()) {
    return std::nullopt;
  }
  const auto is_unmoved = [&](size_t axis, RowNumber number) {
    const auto& inputs = row(number).inputs;
    return std::ranges::equal(operands_, inputs, [&](const Operand& operand, const Placement& placement) {
      return operand.source.placements[axis] == placement;
    });
  };
  std::optional<Composition> found;
  const auto keep_if_legal = [&](Composition unmoved) {
    found = is_legal(unmoved) ? std::optional(std::move(unmoved)) : std::nullopt;
    return found.has_value();
  };
  RowProduct(*this).find(is_unmoved, [&](RowNumbers rows) {
    return std::ranges::any_of(
        fitting, [&](const Precedence* precedence) { return keep_if_legal(composition(rows, *precedence)); });
  });
  return found;
}

bool Compositions::contains(const Composition& wanted) const {
  return RowProduct(*this).find(
      [&](size_t axis, RowNumber number) { return matches_placements(row(number), wanted, axis, call_); },
      [&](RowNumbers rows) {
        return std::ranges::any_of(precedences_, [&](const Precedence& precedence) {
          return is_legal(composition(rows, precedence));
        });
      });
}

}  // namespace funcol
