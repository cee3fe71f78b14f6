#include "propagation/upstream_prices.h"

#include <algorithm>

namespace funcol {
namespace {

// Returns the placement whose price `target` has on an axis where the tensor has `source`: making a partial
// of a replicated tensor costs as little as keeping the tensor replicated.
Placement priced_as(const Placement& source, const Placement& target) {
  return source.is_replicate() && target.is_partial() ? source : target;
}

}  // namespace

bool is_same_upstream(const Placement& a, const Placement& b) {
  if (a.is_norm() && b.is_norm()) {
    return a.norm.value == b.norm.value;  // 2 and 2.0 are equal in Python
  }
  return a == b;
}

bool is_free_unmoved(const UpstreamOperand& operand, bool strided_as_order) {
  const bool has_strided = std::ranges::any_of(operand.source.placements, &Placement::is_strided);
  return operand.is_on_other_mesh ||
         std::ranges::all_of(operand.source.placements, &Placement::is_replicate) ||
         (is_default(operand.source.order) && (!has_strided || operand.strided_as_order == strided_as_order));
}

UpstreamPrices::UpstreamPrices(const UpstreamOperand& operand, std::vector<Placement> placements,
                               bool strided_as_order, const std::vector<RingAxis>& rings)
    : operand_(operand),
      placements_(std::move(placements)),
      strided_as_order_(strided_as_order),
      rings_(rings) {
  const auto& source = operand.source.placements;
  is_free_ = operand.is_on_other_mesh || std::ranges::all_of(source, &Placement::is_replicate);
  if (is_free_) {
    return;
  }
  if (!is_greedy_to(placements_)) {
    plans_ = std::make_unique<UpstreamPlans>(operand.meta, operand.source, placements_, rings);
  }
  find_columns();
  price_all();
}

bool UpstreamPrices::is_of(const UpstreamOperand& operand, const std::vector<Placement>& placements) const {
  return operand.is_on_other_mesh == operand_.is_on_other_mesh && operand.meta.shape == operand_.meta.shape &&
         operand.meta.dtype == operand_.meta.dtype && operand.source == operand_.source &&
         operand.strided_as_order == operand_.strided_as_order && placements == placements_;
}

void UpstreamPrices::find_columns() {
  const auto& sources = operand_.source.placements;
  columns_.resize(sources.size());
  column_of_.resize(sources.size());
  for (size_t axis = 0; axis < columns_.size(); ++axis) {
    auto& columns = columns_[axis];
    for (const auto& placement : placements_) {
      const auto& source = sources[axis];
      const auto target = is_same_upstream(source, placement) ? source
                          : plans_ == nullptr                 ? priced_as(source, placement)
                                                              : placement;
      const auto known = std::ranges::find(columns, target);
      column_of_[axis].push_back(static_cast<uint32_t>(known - columns.begin()));
      if (known == columns.end()) {
        columns.push_back(target);
      }
    }
  }
}

// Returns true if PyTorch has no price for `target`: it gives none to a plan that makes a sum of shards or of
// other partials, and it makes no masks, no norms, and no partials that do not commute.
bool UpstreamPrices::is_made_of_shards(const std::vector<Placement>& target) const {
  for (size_t axis = 0; axis < target.size(); ++axis) {
    const auto& from = operand_.source.placements[axis];
    const auto& to = target[axis];
    if (!to.is_partial() || to == from) {
      continue;
    }
    const bool is_sum = to.op == PartialOp::kSum;
    if (to.mask != 0 || to.is_norm() ||
        (is_sum && (from.is_partial() || (from.is_shard() && !from.is_strided())))) {
      return true;
    }
  }
  return std::ranges::any_of(target, [&](const Placement& a) {
    return a.is_partial() && std::ranges::any_of(target, [&](const Placement& b) {
             return b.is_partial() && !commute(a.op, b.op);
           });
  });
}

// Returns true if PyTorch plans greedily from the source to layouts of these placements.
bool UpstreamPrices::is_greedy_to(const std::vector<Placement>& placements) const {
  return is_default(operand_.source.order) &&
         std::ranges::none_of(operand_.source.placements, &Placement::is_strided) &&
         std::ranges::none_of(placements, &Placement::is_strided);
}

double UpstreamPrices::price(const std::vector<Placement>& target) const {
  const auto& [placements, order] = operand_.source;
  if (plans_ == nullptr || is_greedy_to(target)) {
    const auto bytes = static_cast<double>(num_elements(operand_.meta.shape) * itemsize(operand_.meta.dtype));
    return dtensor_cost({placements, {}}, {target, {}}, bytes, rings_);
  }
  if (target == placements && is_free_unmoved(operand_, strided_as_order_)) {
    return 0;
  }
  const bool hides_source =
      operand_.strided_as_order && std::ranges::any_of(placements, &Placement::is_strided);
  const bool hides_target = strided_as_order_ && std::ranges::any_of(target, &Placement::is_strided);
  return hides_source || hides_target || is_made_of_shards(target) ? kImpossible : plans_->cost_to(target);
}

void UpstreamPrices::price_all() {
  size_t count = 1;
  for (const auto& columns : columns_) {
    count *= columns.size();
    if (count > kMostPriced) {
      return;
    }
  }
  std::vector<double> costs(count);
  std::vector<size_t> digits(columns_.size(), 0);
  std::vector<Placement> target;
  target.reserve(columns_.size());
  for (const auto& columns : columns_) {
    target.push_back(columns[0]);
  }
  for (auto& cost : costs) {
    cost = price(target);
    for (size_t axis = digits.size(); axis-- > 0;) {
      digits[axis] = (digits[axis] + 1) % columns_[axis].size();
      target[axis] = columns_[axis][digits[axis]];
      if (digits[axis] != 0) {
        break;
      }
    }
  }
  least_.resize(columns_.size() + 1);
  least_.back() = std::move(costs);
  for (size_t axis = columns_.size(); axis-- > 0;) {
    const auto& longer = least_[axis + 1];
    const size_t width = columns_[axis].size();
    for (size_t begin = 0; begin < longer.size(); begin += width) {
      const auto first = longer.begin() + static_cast<std::ptrdiff_t>(begin);
      least_[axis].push_back(*std::min_element(first, first + static_cast<std::ptrdiff_t>(width)));
    }
  }
}

double UpstreamPrices::at_least(RowNumbers rows) const {
  if (is_free_) {
    return 0;
  }
  if (!least_.empty()) {
    size_t prefix = 0;
    for (size_t axis = 0; axis < rows.size(); ++axis) {
      prefix = prefix * columns_[axis].size() + column_of_[axis][rows[axis]];
    }
    return least_[rows.size()][prefix];
  }
  if (rows.size() < columns_.size()) {
    return 0;
  }
  std::vector<Placement> target;
  target.reserve(rows.size());
  for (size_t axis = 0; axis < rows.size(); ++axis) {
    target.push_back(columns_[axis][column_of_[axis][rows[axis]]]);
  }
  return price(target);
}

}  // namespace funcol
