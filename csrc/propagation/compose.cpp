#include "propagation/compose.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "propagation/candidates.h"
#include "propagation/prefix_costs.h"

namespace funcol {
namespace {

using RowNumber = Candidates::RowNumber;

constexpr double kRounding = 1e-9;

std::vector<Placement> vocabulary_of_input(const Candidates& candidates, size_t input) {
  std::vector<Placement> placements;
  for (int64_t axis = 0; axis < candidates.mesh().num_axes(); ++axis) {
    for (const RowNumber number : candidates.rows_of(axis)) {
      placements.push_back(candidates.row(number).inputs[input]);
    }
  }
  return vocabulary_of(std::move(placements));
}

// The costs of all inputs, group by group. The destructor gives the searches back to the source.
class InputCosts {
 public:
  InputCosts(const Candidates& candidates, CostSource& source) : candidates_(candidates), source_(source) {
    for (const auto& group : candidates.groups()) {
      number_of_.push_back(groups_.size());
      if (!candidates.stays(group.first)) {
        groups_.push_back({PrefixCosts(candidates, group.first, paths_of(group.first)),
                           static_cast<double>(group.num_inputs)});
      }
    }
  }
  InputCosts(const InputCosts&) = delete;
  InputCosts& operator=(const InputCosts&) = delete;
  InputCosts(InputCosts&&) = delete;
  InputCosts& operator=(InputCosts&&) = delete;
  ~InputCosts() {
    for (auto& paths : all_paths_) {
      source_.give_back(std::move(paths));
    }
  }

  double at_least(size_t precedence, std::span<const RowNumber> rows) const {
    double sum = 0;
    for (const auto& group : groups_) {
      sum += group.num_inputs * group.costs.at_least(precedence, rows);
    }
    return sum;
  }

  // Searches on until the sum is exact (true) or certain to exceed `limit` (false).
  bool sharpen(size_t precedence, std::span<const RowNumber> rows, double limit) {
    double sum = at_least(precedence, rows);
    // The running sum is rounded differently from at_least().
    const double safely_above = limit + kRounding * limit;
    for (auto& group : groups_) {
      while (!group.costs.is_exact(precedence, rows)) {
        if (sum > safely_above) {
          return false;
        }
        const double before = group.costs.at_least(precedence, rows);
        group.costs.extend();
        sum += group.num_inputs * (group.costs.at_least(precedence, rows) - before);
      }
    }
    return true;
  }

  // The cost of each input, after sharpen() returned true.
  std::vector<double> of_inputs(size_t precedence, std::span<const RowNumber> rows) const {
    std::vector<double> costs;
    costs.reserve(candidates_.call().tensors.size());
    for (size_t input = 0; input < candidates_.call().tensors.size(); ++input) {
      const size_t number = number_of_[candidates_.group_of(input)];
      costs.push_back(candidates_.stays(input) ? 0 : groups_[number].costs.at_least(precedence, rows));
    }
    return costs;
  }

 private:
  struct Group {
    PrefixCosts costs;
    double num_inputs;
  };

  ShortestPaths& paths_of(size_t input) {
    const auto& tensor = candidates_.call().tensors[input];
    const int64_t size = itemsize(tensor.dtype);
    auto vocabulary = vocabulary_of_input(candidates_, input);
    for (const auto& paths : all_paths_) {
      if (paths->shape() == tensor.shape && paths->itemsize() == size &&
          paths->source() == candidates_.source(input) && paths->vocabulary() == vocabulary) {
        return *paths;
      }
    }
    all_paths_.push_back(source_.take(tensor.shape, size, candidates_.source(input), std::move(vocabulary)));
    return *all_paths_.back();
  }

  const Candidates& candidates_;
  CostSource& source_;
  std::vector<std::unique_ptr<ShortestPaths>> all_paths_;
  std::vector<Group> groups_;      // groups of inputs that may move
  std::vector<size_t> number_of_;  // group of Candidates -> place in groups_
};

// The best-first search of cheapest().
class CompositionSearch {
 public:
  CompositionSearch(const Candidates& candidates, CostSource& source)
      : candidates_(candidates),
        num_axes_(static_cast<size_t>(candidates.mesh().num_axes())),
        costs_(candidates, source) {}

  std::optional<Choice> run() {
    for (size_t precedence = 0; precedence < candidates_.precedences().size(); ++precedence) {
      add_root(precedence);
    }
    while (!queue_.empty()) {
      const auto [bound_before, node] = pop();
      const bool is_exact = costs_.sharpen(nodes_[node].precedence, rows(node), least_bound());
      const double bound = bound_of(node);
      if (!is_exact || bound > bound_before) {
        push(node, bound);
      } else if (nodes_[node].num_rows < num_axes_) {
        expand(node);
      } else if (auto choice = choice_of(node)) {
        return choice;
      }
    }
    return std::nullopt;
  }

 private:
  struct Node {
    size_t precedence;
    size_t num_rows;
  };
  struct Entry {
    double bound;
    size_t node;
  };

  std::span<const RowNumber> rows(size_t node) const {
    return {rows_.data() + node * num_axes_, nodes_[node].num_rows};
  }
  double bound_of(size_t node) const { return costs_.at_least(nodes_[node].precedence, rows(node)); }

  void add_root(size_t precedence) {
    nodes_.push_back({precedence, 0});
    rows_.resize(nodes_.size() * num_axes_, 0);
    push(nodes_.size() - 1, bound_of(nodes_.size() - 1));
  }

  void expand(size_t node) {
    const size_t axis = nodes_[node].num_rows;
    for (const RowNumber number : candidates_.rows_of(static_cast<int64_t>(axis))) {
      if (!candidates_.may_follow(rows(node), number)) {
        continue;
      }
      const size_t child = nodes_.size();
      nodes_.push_back({nodes_[node].precedence, axis + 1});
      rows_.resize(nodes_.size() * num_axes_, 0);
      std::copy_n(rows_.begin() + static_cast<std::ptrdiff_t>(node * num_axes_), axis,
                  rows_.begin() + static_cast<std::ptrdiff_t>(child * num_axes_));
      rows_[child * num_axes_ + axis] = number;
      push(child, bound_of(child));
    }
  }

  double least_bound() const {
    if (queue_.empty()) {
      return kImpossible;
    }
    return queue_.front().bound;
  }

  // Orders nodes by bound, then by the full product. Rows that are not chosen yet are 0, so a node comes
  // where its first composition may come.
  bool is_later(const Entry& a, const Entry& b) const {
    if (a.bound != b.bound) {
      return a.bound > b.bound;
    }
    const RowNumber* const rows_a = rows_.data() + a.node * num_axes_;
    const RowNumber* const rows_b = rows_.data() + b.node * num_axes_;
    for (size_t axis = 0; axis < num_axes_; ++axis) {
      if (rows_a[axis] != rows_b[axis]) {
        return rows_a[axis] > rows_b[axis];
      }
    }
    return nodes_[a.node].precedence > nodes_[b.node].precedence;
  }

  void push(size_t node, double bound) {
    if (bound != kImpossible) {
      queue_.push_back({bound, node});
      std::ranges::push_heap(queue_, [this](const Entry& a, const Entry& b) { return is_later(a, b); });
    }
  }

  Entry pop() {
    const Entry entry = queue_.front();
    std::ranges::pop_heap(queue_, [this](const Entry& a, const Entry& b) { return is_later(a, b); });
    queue_.pop_back();
    return entry;
  }

  std::optional<Choice> choice_of(size_t node) const {
    const size_t precedence = nodes_[node].precedence;
    Choice choice{candidates_.composition(rows(node), candidates_.precedences()[precedence]), {}, false};
    if (!candidates_.is_legal(choice.composition)) {
      return std::nullopt;
    }
    choice.costs = costs_.of_inputs(precedence, rows(node));
    choice.moves = candidates_.moves(choice.composition);
    return choice;
  }

  const Candidates& candidates_;
  const size_t num_axes_;
  InputCosts costs_;
  std::vector<Node> nodes_;
  std::vector<RowNumber> rows_;  // [node][axis]
  std::vector<Entry> queue_;
};

// Enumerates the full product of the rows.
class FullProduct {
 public:
  FullProduct(const Candidates& candidates, CostSource& source)
      : candidates_(candidates), costs_(candidates, source) {}

  std::vector<Choice> run() {
    visit();
    return std::move(choices_);
  }

 private:
  void visit() {
    const auto axis = static_cast<int64_t>(rows_.size());
    if (axis == candidates_.mesh().num_axes()) {
      add();
      return;
    }
    for (const RowNumber number : candidates_.rows_of(axis)) {
      if (candidates_.may_follow(rows_, number)) {
        rows_.push_back(number);
        visit();
        rows_.pop_back();
      }
    }
  }

  // Adds one choice for each shard order that makes a difference.
  void add() {
    std::vector<Composition> seen;
    for (size_t precedence = 0; precedence < candidates_.precedences().size(); ++precedence) {
      auto composition = candidates_.composition(rows_, candidates_.precedences()[precedence]);
      if (std::ranges::find(seen, composition) != seen.end()) {
        continue;
      }
      seen.push_back(composition);
      if (candidates_.is_legal(composition)) {
        costs_.sharpen(precedence, rows_, kImpossible);
        const bool moves = candidates_.moves(composition);
        choices_.push_back({std::move(composition), costs_.of_inputs(precedence, rows_), moves});
      }
    }
  }

  const Candidates& candidates_;
  InputCosts costs_;
  std::vector<RowNumber> rows_;
  std::vector<Choice> choices_;
};

}  // namespace

std::optional<Choice> cheapest(const OpCall& call, const Rows& rows, const std::vector<Operand>& operands,
                               const std::vector<std::optional<Layout>>& required, CostSource& costs) {
  const Candidates candidates(call, rows, costs.mesh(), operands, required);
  if (auto unmoved = candidates.unmoved()) {
    return Choice{std::move(*unmoved), std::vector<double>(operands.size(), 0), false};
  }
  return CompositionSearch(candidates, costs).run();
}

std::vector<Choice> all_choices(const OpCall& call, const Rows& rows, const std::vector<Operand>& operands,
                                const std::vector<std::optional<Layout>>& required, CostSource& costs) {
  const Candidates candidates(call, rows, costs.mesh(), operands, required);
  return FullProduct(candidates, costs).run();
}

}  // namespace funcol
