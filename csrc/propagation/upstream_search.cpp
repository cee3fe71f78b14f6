#include "propagation/upstream_search.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "propagation/row_search.h"
#include "propagation/upstream_prices.h"

namespace funcol {
namespace {

// Returns the class of a partial, as PyTorch distinguishes: Partial, _MaskPartial or _NormPartial.
std::array<bool, 2> class_of(const Placement& partial) { return {partial.mask != 0, partial.is_norm()}; }

bool mixes_upstream(const Placement& a, const Placement& b) {
  return !a.is_partial() || !b.is_partial() || (class_of(a) == class_of(b) && commute(a.op, b.op));
}

// The rows of each axis, and which compositions of them are legal.
class UpstreamCompositions {
 public:
  explicit UpstreamCompositions(const UpstreamQuestion& question) : question_(question) {
    add_rows();
    for (size_t axis = 0; axis < num_axes(); ++axis) {
      auto& numbers = rows_of_.emplace_back();
      for (RowNumber number = 0; number < num_rows(); ++number) {
        if (is_allowed(rows_[number], axis)) {
          numbers.push_back(number);
        }
      }
    }
    for (const auto& row : rows_) {
      has_partials_.push_back(has_partials(row));
    }
  }

  RowNumber num_rows() const { return static_cast<RowNumber>(rows_.size()); }
  const Row& row(RowNumber number) const { return rows_[number]; }

  // Returns true if PyTorch rejects the rows because some have an output that others lack.
  bool mix_lacking_outputs() const {
    for (size_t i = 0; i < question_.num_outputs; ++i) {
      const auto has = [i](const Row& row) { return row.outputs[i].has_value(); };
      if (num_axes() > 1 && std::ranges::any_of(rows_, has) && !std::ranges::all_of(rows_, has)) {
        return true;
      }
    }
    return false;
  }

  // Implements the space of row_search.h. PyTorch's compositions have the default shard order.
  size_t num_axes() const { return question_.mesh.sizes.size(); }
  static size_t num_orders() { return 1; }
  const std::vector<RowNumber>& rows_of(size_t axis) const { return rows_of_[axis]; }
  bool may_follow(RowNumbers rows, RowNumber next) const {
    for (const auto before : rows) {
      if (has_partials_[before] && has_partials_[next] &&
          !all_placements(rows_[before], rows_[next], mixes_upstream)) {
        return false;
      }
    }
    for (size_t i = 0; i < question_.operands.size(); ++i) {
      if (!leaves_parts(i, rows, next)) {
        return false;
      }
    }
    return true;
  }

  std::vector<Row> composition(RowNumbers rows) const {
    std::vector<Row> chosen;
    for (const auto number : rows) {
      chosen.push_back(rows_[number]);
    }
    return chosen;
  }

  bool is_accepted(RowNumbers rows) const {
    return !question_.accepts || question_.accepts(composition(rows));
  }

 private:
  void add_rows() {
    const auto is_replicate = [](const Placement& placement) { return placement.is_replicate(); };
    const auto replicates = [&](const Row& row) {
      return std::ranges::all_of(row.inputs, is_replicate) &&
             std::ranges::all_of(row.outputs,
                                 [&](const auto& output) { return !output || is_replicate(*output); });
    };
    if (std::ranges::none_of(question_.rows, replicates)) {
      rows_.push_back(replicated());
    }
    for (const auto& row : question_.rows) {
      if (!any_placement(row, is_any_shard)) {
        rows_.push_back(row);
        continue;
      }
      for (const int64_t factor : question_.split_factors) {
        rows_.push_back(with_split_factor(row, factor));
      }
    }
  }

  Row replicated() const {
    Row row;
    row.inputs.resize(question_.operands.size());
    for (size_t i = 0; i < question_.num_outputs; ++i) {
      const bool is_lacking =
          (i < question_.lacks_output.size() && question_.lacks_output[i]) ||
          (!question_.rows.empty() && std::ranges::none_of(question_.rows, [i](const Row& other) {
            return other.outputs[i].has_value();
          }));
      row.outputs.push_back(is_lacking ? std::nullopt : std::optional(Placement::replicate()));
    }
    return row;
  }

  bool is_allowed(const Row& row, size_t axis) const {
    if (question_.is_in_place) {
      const auto& held = question_.operands.at(0).source.placements[axis];
      const auto& first = row.outputs.empty() ? std::optional(row.inputs[0]) : row.outputs[0];
      if (!is_same_upstream(row.inputs[0], held) || (first && !is_same_upstream(*first, held))) {
        return false;
      }
    }
    for (size_t i = 0; i < question_.required.size(); ++i) {
      const auto& required = question_.required[i];
      const auto& output = row.outputs.at(i);
      if (required && (!output || !is_same_upstream(*output, (*required)[axis]))) {
        return false;
      }
    }
    return true;
  }

  // Returns true if every rank has a part of this operand, or the operand may leave ranks without elements.
  bool leaves_parts(size_t input, RowNumbers rows, RowNumber next) const {
    const auto input_on = [&](size_t axis) -> const Placement& {
      return rows_[axis < rows.size() ? rows[axis] : next].inputs[input];
    };
    const auto& operand = question_.operands[input];
    if (operand.is_on_other_mesh) {
      return true;
    }
    const auto& shape = operand.meta.shape;
    bool keeps_placements = question_.allows_uneven;
    bool leaves = true;
    for (size_t axis = 0; axis <= rows.size() && (keeps_placements || leaves); ++axis) {
      const auto& placement = input_on(axis);
      keeps_placements = keeps_placements && is_same_upstream(placement, operand.source.placements[axis]);
      if (!placement.is_shard()) {
        continue;
      }
      int64_t num_shards = 1;
      for (size_t other = 0; other <= axis; ++other) {
        const auto& cut = input_on(other);
        num_shards *= cut.is_shard() && cut.dim == placement.dim ? question_.mesh.sizes[other] : 1;
      }
      leaves = leaves && placement.dim < static_cast<int64_t>(shape.size()) &&
               shape[placement.dim] >= num_shards * placement.split_factor;
    }
    return keeps_placements || leaves;
  }

  const UpstreamQuestion& question_;
  std::vector<Row> rows_;
  std::vector<std::vector<RowNumber>> rows_of_;
  std::vector<bool> has_partials_;  // by row
};

// The costs of the operands, added up as PyTorch adds them.
class UpstreamCosts {
 public:
  UpstreamCosts(const UpstreamQuestion& question, const UpstreamCompositions& compositions)
      : rings_(ring_axes(question.mesh)) {
    prices_.reserve(question.operands.size());
    for (size_t i = 0; i < question.operands.size(); ++i) {
      std::vector<Placement> placements;
      placements.reserve(static_cast<size_t>(compositions.num_rows()));
      for (RowNumber number = 0; number < compositions.num_rows(); ++number) {
        placements.push_back(compositions.row(number).inputs[i]);
      }
      const auto known = std::ranges::find_if(
          prices_, [&](const auto& prices) { return prices.is_of(question.operands[i], placements); });
      prices_of_.push_back(known - prices_.begin());
      if (known == prices_.end()) {
        prices_.emplace_back(question.operands[i], std::move(placements), question.strided_as_order, rings_);
      }
    }
  }

  // Returns a lower bound of the sum of a composition with these rows: rounding keeps the order of sums.
  double at_least(size_t /*order*/, RowNumbers rows) const {
    double sum = 0;
    for (const auto prices : prices_of_) {
      sum += prices_[prices].at_least(rows);
    }
    return sum;
  }

  // Returns `bound`, since all bounds are exact.
  static RowBound sharpened(size_t /*order*/, RowNumbers /*rows*/, double bound, double /*limit*/) {
    return {bound, true};
  }

  std::vector<double> of_operands(RowNumbers rows) const {
    std::vector<double> costs;
    costs.reserve(prices_of_.size());
    for (const auto prices : prices_of_) {
      costs.push_back(prices_[prices].at_least(rows));
    }
    return costs;
  }

 private:
  const std::vector<RingAxis> rings_;
  std::vector<UpstreamPrices> prices_;
  std::vector<size_t> prices_of_;  // [operand]
};

class Search {
 public:
  Search(const UpstreamQuestion& question, const UpstreamCompositions& compositions)
      : question_(question), compositions_(compositions) {}

  std::optional<UpstreamChoice> run() {
    if (question_.prefers_unmoved && find_last_unmoved()) {
      return UpstreamChoice{compositions_.composition(chosen_),
                            std::vector<double>(question_.operands.size())};
    }
    if (find_cheapest() || find_first()) {
      return UpstreamChoice{compositions_.composition(chosen_), costs().of_operands(chosen_)};
    }
    return std::nullopt;
  }

 private:
  // Returns the costs, made on first use: most calls move nothing and need no costs.
  const UpstreamCosts& costs() {
    if (!costs_) {
      costs_.emplace(question_, compositions_);
    }
    return *costs_;
  }

  bool moves_positional(const Row& row, size_t axis) const {
    for (size_t i = 0; i < question_.operands.size(); ++i) {
      const auto& operand = question_.operands[i];
      if (operand.is_positional && !operand.is_on_other_mesh &&
          !is_same_upstream(row.inputs[i], operand.source.placements[axis])) {
        return true;
      }
    }
    return false;
  }

  // Returns true if the positional operands, which do not move, and the keyword tensors cost nothing.
  bool is_free(RowNumbers rows) {
    const bool is_all = std::ranges::all_of(question_.operands, &UpstreamOperand::is_positional);
    const auto costs_nothing = [&](const auto& operand) {
      return is_free_unmoved(operand, question_.strided_as_order);
    };
    return is_all ? std::ranges::all_of(question_.operands, costs_nothing) : costs().at_least(0, rows) == 0;
  }

  bool find_last_unmoved() {
    return RowProduct(compositions_, Direction::kBackward)
        .find(
            [&](size_t axis, RowNumber number) { return !moves_positional(compositions_.row(number), axis); },
            [&](RowNumbers rows) { return is_free(rows) && accept(rows); });
  }

  bool find_cheapest() {
    return RowSearch(compositions_, costs()).find([&](size_t, RowNumbers rows) { return accept(rows); });
  }

  bool find_first() {
    return RowProduct(compositions_)
        .find([](size_t, RowNumber) { return true; }, [&](RowNumbers rows) { return accept(rows); });
  }

  // Chooses the composition if PyTorch's filter accepts it.
  bool accept(RowNumbers rows) {
    chosen_.assign(rows.begin(), rows.end());
    return compositions_.is_accepted(rows);
  }

  const UpstreamQuestion& question_;
  const UpstreamCompositions& compositions_;
  std::optional<UpstreamCosts> costs_;
  std::vector<RowNumber> chosen_;
};

}  // namespace

std::optional<UpstreamChoice> upstream_choice(const UpstreamQuestion& question) {
  const UpstreamCompositions compositions(question);
  if (compositions.mix_lacking_outputs()) {
    return std::nullopt;
  }
  return Search(question, compositions).run();
}

}  // namespace funcol
