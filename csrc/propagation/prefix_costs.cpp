#include "propagation/prefix_costs.h"

#include <algorithm>

namespace funcol {
namespace {

// More prefixes than this are kept in a hash map instead of an array.
constexpr uint64_t kMaxDense = uint64_t{1} << 16;

// A State::place and State::split that no state has.
constexpr uint8_t kNowhere = UINT8_MAX;

}  // namespace

PrefixCosts::PrefixCosts(const Compositions& compositions, size_t input, ShortestPaths& paths)
    : compositions_(compositions), input_(input), paths_(paths) {
  const auto& precedences = compositions.precedences();
  const int64_t num_axes = compositions.mesh().num_axes();
  uint64_t num_prefixes = precedences.size();
  uint64_t first_key = 0;
  axes_.reserve(num_axes);
  for (int64_t axis = 0; axis < num_axes; ++axis) {
    add_axis(axis, first_key);
    first_key += num_prefixes;
    num_prefixes *= std::max<uint64_t>(axes_.back().columns.size(), 1);
  }
  first_complete_key_ = first_key;
  if (first_key + num_prefixes <= kMaxDense) {
    dense_.assign(first_key + num_prefixes, kUnknown);
  }
  for (const auto& precedence : precedences) {
    auto& rank_of = rank_of_.emplace_back(num_axes);
    for (int64_t i = 0; i < num_axes; ++i) {
      rank_of[precedence[i]] = i;
    }
  }
  // The present layout of the input, with its masks, costs nothing.
  const Layout& source = paths.source();
  for (size_t precedence = 0; precedence < precedences.size(); ++precedence) {
    if (funcol::is_cut_by(source, precedences[precedence])) {
      visit(0, precedence, 0,
            [&](size_t axis, const Column& column) { return column.placement == source.placements[axis]; });
    }
  }
  frontier_ = paths.at_least(num_visited_);
}

void PrefixCosts::add_axis(int64_t axis, uint64_t first_key) {
  const Space& space = paths_.space();
  Axis& added = axes_.emplace_back(Axis{space.slot(axis), {}, {}, first_key});
  added.column_of.resize(compositions_.num_rows());
  for (const RowNumber number : compositions_.rows_of(axis)) {
    const Placement& placement = compositions_.row(number).inputs[input_];
    const auto known = std::ranges::find(added.columns, placement, &Column::placement);
    added.column_of[number] = static_cast<uint32_t>(known - added.columns.begin());
    if (known == added.columns.end()) {
      // An input that moves loses the masks that it has.
      const bool makes_mask = placement.mask != 0 && placement != paths_.source().placements[axis];
      const uint8_t place = placement.mask != 0 && !makes_mask       ? kNowhere
                            : makes_mask || placement.is_replicate() ? State::kReplicate
                            : placement.is_partial()                 ? State::of(placement.op)
                                                                     : static_cast<uint8_t>(placement.dim);
      const int split = placement.is_shard() ? space.split(placement.split_factor) : 0;
      added.columns.push_back(
          {placement, place, split < 0 ? kNowhere : static_cast<uint8_t>(split), makes_mask});
    }
  }
  if (std::ranges::any_of(added.columns, &Column::makes_mask)) {
    maskable_axes_.push_back(axis);
  }
}

uint64_t PrefixCosts::key(size_t precedence, RowNumbers rows) const {
  uint64_t prefix = precedence;
  for (size_t axis = 0; axis < rows.size(); ++axis) {
    prefix = prefix * axes_[axis].columns.size() + axes_[axis].column_of[rows[axis]];
  }
  return prefix + (rows.size() < axes_.size() ? axes_[rows.size()].first_key : first_complete_key_);
}

double PrefixCosts::get(uint64_t key) const {
  if (!dense_.empty()) {
    return dense_[key];
  }
  const auto found = sparse_.find(key);
  return found == sparse_.end() ? kUnknown : found->second;
}

void PrefixCosts::set(uint64_t key, double cost) {
  if (dense_.empty()) {
    sparse_.try_emplace(key, cost);
  } else if (dense_[key] < 0) {
    dense_[key] = cost;
  }
}

void PrefixCosts::extend() {
  const bool is_mask_next = !masked_.empty() && masked_.top().cost <= paths_.at_least(num_visited_);
  if (const auto* settled = is_mask_next ? nullptr : paths_.nearest(num_visited_)) {
    ++num_visited_;
    visit(settled->state, settled->cost, kNoAxis);
    if (!maskable_axes_.empty()) {
      masked_.push({settled->cost + paths_.mask_cost(settled->state), settled->state});
    }
  } else if (!masked_.empty()) {
    for (const int64_t axis : maskable_axes_) {
      visit(masked_.top().replicated, masked_.top().cost, axis);
    }
    masked_.pop();
  }
  frontier_ = std::min(paths_.at_least(num_visited_), masked_.empty() ? kImpossible : masked_.top().cost);
}

void PrefixCosts::visit(const State& state, double cost, int64_t masked_axis) {
  const auto fits = [&](size_t axis, const Column& column) {
    if (column.makes_mask != (static_cast<int64_t>(axis) == masked_axis)) {
      return false;
    }
    const int slot = axes_[axis].slot;
    // On an axis of one rank all placements without masks are equal.
    return slot < 0 ? column.place != kNowhere
                    : column.place == state.place.at(slot) && column.split == state.split.at(slot);
  };
  for (size_t precedence = 0; precedence < rank_of_.size(); ++precedence) {
    if (is_cut_by(state, precedence)) {
      visit(0, precedence, cost, fits);
    }
  }
}

bool PrefixCosts::is_cut_by(const State& state, size_t precedence) const {
  const Space& space = paths_.space();
  const auto& rank_of = rank_of_[precedence];
  for (int b = 1; b < space.num_slots(); ++b) {
    for (int a = 0; a < b && state.is_shard(b); ++a) {
      if (state.place.at(a) == state.place.at(b) && (state.position.at(a) < state.position.at(b)) !=
                                                        (rank_of[space.axis(a)] < rank_of[space.axis(b)])) {
        return false;
      }
    }
  }
  return true;
}

template <typename Fits>
bool PrefixCosts::visit(size_t axis, uint64_t prefix, double cost, const Fits& fits) {
  if (axis == axes_.size()) {
    set(first_complete_key_ + prefix, cost);
    return true;
  }
  const auto& columns = axes_[axis].columns;
  bool any = false;
  for (size_t i = 0; i < columns.size(); ++i) {
    any = (fits(axis, columns[i]) && visit(axis + 1, prefix * columns.size() + i, cost, fits)) || any;
  }
  if (any) {
    set(axes_[axis].first_key + prefix, cost);
  }
  return any;
}

}  // namespace funcol
