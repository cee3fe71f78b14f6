#include "propagation/pytorch_choice.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include "propagation/pytorch_prices.h"

namespace funcol {
namespace {

using RowNumbers = std::span<const PyTorchRowNumber>;

// The classes of Python that PyTorch tells apart: Partial, _MaskPartial and _NormPartial.
std::array<bool, 2> class_of(const Placement& partial) { return {partial.mask != 0, partial.is_norm()}; }

bool mixes_in_pytorch(const Placement& a, const Placement& b) {
  const auto is_linear = [](PartialOp op) { return op == PartialOp::kSum || op == PartialOp::kAvg; };
  return !a.is_partial() || !b.is_partial() ||
         (class_of(a) == class_of(b) && (a.op == b.op || (is_linear(a.op) && is_linear(b.op))));
}

// The rows of each axis, and which compositions of them are legal.
class Compositions {
 public:
  explicit Compositions(const PyTorchQuestion& question) : question_(question) {
    add_rows();
    for (size_t axis = 0; axis < num_axes(); ++axis) {
      auto& numbers = rows_of_.emplace_back();
      for (PyTorchRowNumber number = 0; number < num_rows(); ++number) {
        if (is_allowed(rows_[number], axis)) {
          numbers.push_back(number);
        }
      }
    }
    for (const auto& a : rows_) {
      for (const auto& b : rows_) {
        mixes_.push_back(all_placements(a, b, mixes_in_pytorch));
      }
    }
  }

  size_t num_axes() const { return question_.mesh.sizes.size(); }
  PyTorchRowNumber num_rows() const { return static_cast<PyTorchRowNumber>(rows_.size()); }
  const Row& row(PyTorchRowNumber number) const { return rows_[number]; }
  const std::vector<PyTorchRowNumber>& rows_of(size_t axis) const { return rows_of_[axis]; }

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

  // Returns true if `next` may be the row of the axis after those of `rows`. False only if no such
  // composition is legal.
  bool may_follow(RowNumbers rows, PyTorchRowNumber next) const {
    for (const auto before : rows) {
      if (!mixes_[static_cast<size_t>(before) * rows_.size() + static_cast<size_t>(next)]) {
        return false;
      }
    }
    std::vector<PyTorchRowNumber> longer(rows.begin(), rows.end());
    longer.push_back(next);
    return leaves_parts(longer);
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
      if (!is_same_for_pytorch(row.inputs[0], held) || (first && !is_same_for_pytorch(*first, held))) {
        return false;
      }
    }
    for (size_t i = 0; i < question_.required.size(); ++i) {
      const auto& required = question_.required[i];
      const auto& output = row.outputs.at(i);
      if (required && (!output || !is_same_for_pytorch(*output, (*required)[axis]))) {
        return false;
      }
    }
    return true;
  }

  bool leaves_parts(RowNumbers rows) const {
    for (size_t i = 0; i < question_.operands.size(); ++i) {
      if (!leaves_parts(i, rows)) {
        return false;
      }
    }
    return true;
  }

  // Returns true if every rank has a part of this operand, or the operand may leave ranks without elements.
  bool leaves_parts(size_t input, RowNumbers rows) const {
    const auto& operand = question_.operands[input];
    if (operand.is_elsewhere) {
      return true;
    }
    const auto& shape = operand.meta.shape;
    bool stays = question_.allows_uneven;
    bool leaves = true;
    for (size_t axis = 0; axis < rows.size() && (stays || leaves); ++axis) {
      const auto& placement = rows_[rows[axis]].inputs[input];
      stays = stays && is_same_for_pytorch(placement, operand.source.placements[axis]);
      if (!placement.is_shard()) {
        continue;
      }
      int64_t num_shards = 1;
      for (size_t other = 0; other <= axis; ++other) {
        const auto& cut = rows_[rows[other]].inputs[input];
        num_shards *= cut.is_shard() && cut.dim == placement.dim ? question_.mesh.sizes[other] : 1;
      }
      leaves = leaves && placement.dim < static_cast<int64_t>(shape.size()) &&
               shape[placement.dim] >= num_shards * placement.split_factor;
    }
    return stays || leaves;
  }

  const PyTorchQuestion& question_;
  std::vector<Row> rows_;
  std::vector<std::vector<PyTorchRowNumber>> rows_of_;
  std::vector<bool> mixes_;  // [row][row]
};

// The costs of the operands, added up as PyTorch adds them.
class Costs {
 public:
  Costs(const PyTorchQuestion& question, const Compositions& compositions)
      : rings_(ring_axes(question.mesh)) {
    prices_.reserve(question.operands.size());
    for (size_t i = 0; i < question.operands.size(); ++i) {
      std::vector<Placement> placements;
      placements.reserve(static_cast<size_t>(compositions.num_rows()));
      for (PyTorchRowNumber number = 0; number < compositions.num_rows(); ++number) {
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

  // Never above the sum of a composition with these rows: rounding keeps the order of sums.
  double at_least(RowNumbers rows) const {
    double sum = 0;
    for (const auto prices : prices_of_) {
      sum += prices_[prices].at_least(rows);
    }
    return sum;
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
  std::vector<PyTorchPrices> prices_;
  std::vector<size_t> prices_of_;  // [operand]
};

class Search {
 public:
  Search(const PyTorchQuestion& question, const Compositions& compositions)
      : question_(question), compositions_(compositions) {}

  std::optional<PyTorchChoice> run() {
    std::vector<PyTorchRowNumber> rows;
    if (question_.prefers_unmoved && find_last_unmoved(rows)) {
      return PyTorchChoice{compositions_.composition(rows), std::vector<double>(question_.operands.size())};
    }
    if (find_cheapest(rows) || find_first(rows)) {
      return PyTorchChoice{compositions_.composition(rows), costs().of_operands(rows)};
    }
    return std::nullopt;
  }

 private:
  struct Node {
    double bound;
    std::vector<PyTorchRowNumber> rows;

    // std::push_heap puts the greatest in front: the least bound, then the first of the full product. Rows
    // that are not chosen yet count as the first ones.
    friend bool operator<(const Node& a, const Node& b) {
      if (a.bound != b.bound) {
        return a.bound > b.bound;
      }
      return std::ranges::lexicographical_compare(b.rows, a.rows);
    }
  };

  // Most calls move nothing, and need no costs.
  const Costs& costs() {
    if (!costs_) {
      costs_.emplace(question_, compositions_);
    }
    return *costs_;
  }

  bool is_whole(RowNumbers rows) const { return rows.size() == compositions_.num_axes(); }

  bool moves_positional(const Row& row, size_t axis) const {
    for (size_t i = 0; i < question_.operands.size(); ++i) {
      const auto& operand = question_.operands[i];
      if (operand.is_positional && !operand.is_elsewhere &&
          !is_same_for_pytorch(row.inputs[i], operand.source.placements[axis])) {
        return true;
      }
    }
    return false;
  }

  // Returns true if the positional operands, which stay, and the keyword tensors cost nothing.
  bool is_free(RowNumbers rows) {
    const bool is_all = std::ranges::all_of(question_.operands, &PyTorchOperand::is_positional);
    const auto stays = [&](const auto& operand) {
      return stays_for_free(operand, question_.strided_as_order);
    };
    return is_all ? std::ranges::all_of(question_.operands, stays) : costs().at_least(rows) == 0;
  }

  bool find_last_unmoved(std::vector<PyTorchRowNumber>& rows) {
    if (is_whole(rows)) {
      return is_free(rows) && compositions_.is_accepted(rows);
    }
    const auto& numbers = compositions_.rows_of(rows.size());
    for (size_t i = numbers.size(); i-- > 0;) {
      if (moves_positional(compositions_.row(numbers[i]), rows.size()) ||
          !compositions_.may_follow(rows, numbers[i])) {
        continue;
      }
      rows.push_back(numbers[i]);
      if (find_last_unmoved(rows)) {
        return true;
      }
      rows.pop_back();
    }
    return false;
  }

  bool find_cheapest(std::vector<PyTorchRowNumber>& rows) {
    const auto is_after = [](const Node& a, const Node& b) { return a < b; };
    std::vector<Node> queue{{costs().at_least({}), {}}};
    while (!queue.empty()) {
      std::ranges::pop_heap(queue, is_after);
      const Node node = std::move(queue.back());
      queue.pop_back();
      if (is_whole(node.rows)) {
        if (compositions_.is_accepted(node.rows)) {
          rows = node.rows;
          return true;
        }
        continue;
      }
      for (const auto number : compositions_.rows_of(node.rows.size())) {
        if (!compositions_.may_follow(node.rows, number)) {
          continue;
        }
        auto longer = node.rows;
        longer.push_back(number);
        const double bound = costs().at_least(longer);
        if (bound != kImpossible) {
          queue.push_back({bound, std::move(longer)});
          std::ranges::push_heap(queue, is_after);
        }
      }
    }
    return false;
  }

  bool find_first(std::vector<PyTorchRowNumber>& rows) const {
    if (is_whole(rows)) {
      return compositions_.is_accepted(rows);
    }
    for (const auto number : compositions_.rows_of(rows.size())) {
      if (!compositions_.may_follow(rows, number)) {
        continue;
      }
      rows.push_back(number);
      if (find_first(rows)) {
        return true;
      }
      rows.pop_back();
    }
    return false;
  }

  const PyTorchQuestion& question_;
  const Compositions& compositions_;
  std::optional<Costs> costs_;
};

}  // namespace

std::optional<PyTorchChoice> pytorch_choice(const PyTorchQuestion& question) {
  const Compositions compositions(question);
  if (compositions.mix_lacking_outputs()) {
    return std::nullopt;
  }
  return Search(question, compositions).run();
}

}  // namespace funcol
