#include "propagation/composition_search.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "propagation/compositions.h"
#include "propagation/prefix_costs.h"
#include "propagation/row_search.h"

namespace funcol {
namespace {

constexpr double kRounding = 1e-9;

std::vector<Placement> vocabulary_of_input(const Compositions& compositions, size_t input) {
  std::vector<Placement> placements;
  for (int64_t axis = 0; axis < compositions.mesh().num_axes(); ++axis) {
    for (const RowNumber number : compositions.rows_of(axis)) {
      placements.push_back(compositions.row(number).inputs[input]);
    }
  }
  return vocabulary_of(std::move(placements));
}

// The costs of all inputs, group by group. The destructor returns the searches to the pool.
class InputCosts {
 public:
  InputCosts(const Compositions& compositions, SearchPool& pool) : compositions_(compositions), pool_(pool) {
    for (const auto& group : compositions.groups()) {
      number_of_.push_back(groups_.size());
      if (!compositions.is_pinned(group.first)) {
        groups_.push_back({PrefixCosts(compositions, group.first, paths_of(group.first)),
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
      pool_.give_back(std::move(paths));
    }
  }

  double at_least(size_t precedence, RowNumbers rows) const {
    double sum = 0;
    for (const auto& group : groups_) {
      sum += group.num_inputs * group.costs.at_least(precedence, rows);
    }
    return sum;
  }

  // Searches on until the sum is exact or certain to exceed `limit`.
  RowBound sharpened(size_t precedence, RowNumbers rows, double /*bound*/, double limit) {
    double sum = at_least(precedence, rows);
    // The running sum is rounded differently from at_least().
    const double safely_above = limit + kRounding * limit;
    for (auto& group : groups_) {
      while (!group.costs.is_exact(precedence, rows)) {
        if (sum > safely_above) {
          return {at_least(precedence, rows), false};
        }
        const double before = group.costs.at_least(precedence, rows);
        group.costs.extend();
        sum += group.num_inputs * (group.costs.at_least(precedence, rows) - before);
      }
    }
    return {at_least(precedence, rows), true};
  }

  // Returns the cost of each input. The sum must be exact.
  std::vector<double> of_inputs(size_t precedence, RowNumbers rows) const {
    std::vector<double> costs;
    costs.reserve(compositions_.call().tensors.size());
    for (size_t input = 0; input < compositions_.call().tensors.size(); ++input) {
      const size_t number = number_of_[compositions_.group_of(input)];
      costs.push_back(compositions_.is_pinned(input) ? 0 : groups_[number].costs.at_least(precedence, rows));
    }
    return costs;
  }

 private:
  struct Group {
    PrefixCosts costs;
    double num_inputs;
  };

  ShortestPaths& paths_of(size_t input) {
    const auto& tensor = compositions_.call().tensors[input];
    const int64_t size = itemsize(tensor.dtype);
    auto vocabulary = vocabulary_of_input(compositions_, input);
    for (const auto& paths : all_paths_) {
      if (paths->shape() == tensor.shape && paths->itemsize() == size &&
          paths->source() == compositions_.source(input) && paths->vocabulary() == vocabulary) {
        return *paths;
      }
    }
    all_paths_.push_back(pool_.take(tensor.shape, size, compositions_.source(input), std::move(vocabulary)));
    return *all_paths_.back();
  }

  const Compositions& compositions_;
  SearchPool& pool_;
  std::vector<std::unique_ptr<ShortestPaths>> all_paths_;
  std::vector<Group> groups_;      // groups of inputs that may move
  std::vector<size_t> number_of_;  // group of Compositions -> place in groups_
};

}  // namespace

std::optional<PricedComposition> cheapest_composition(const OpCall& call, const Rows& rows,
                                                      const std::vector<Operand>& operands,
                                                      const std::vector<std::optional<Layout>>& required,
                                                      SearchPool& costs) {
  const Compositions compositions(call, rows, costs.mesh(), operands, required);
  if (auto unmoved = compositions.unmoved()) {
    return PricedComposition{std::move(*unmoved), std::vector<double>(operands.size(), 0), false};
  }
  InputCosts priced(compositions, costs);
  std::optional<PricedComposition> choice;
  RowSearch(compositions, priced).find([&](size_t precedence, RowNumbers chosen) {
    auto composition = compositions.composition(chosen, compositions.precedences()[precedence]);
    if (!compositions.is_legal(composition)) {
      return false;
    }
    const bool moves = compositions.moves(composition);
    choice = PricedComposition{std::move(composition), priced.of_inputs(precedence, chosen), moves};
    return true;
  });
  return choice;
}

std::vector<PricedComposition> legal_compositions(const OpCall& call, const Rows& rows,
                                                  const std::vector<Operand>& operands,
                                                  const std::vector<std::optional<Layout>>& required,
                                                  SearchPool& costs) {
  const Compositions compositions(call, rows, costs.mesh(), operands, required);
  InputCosts priced(compositions, costs);
  std::vector<PricedComposition> choices;
  RowProduct(compositions)
      .find([](size_t, RowNumber) { return true; },
            [&](RowNumbers chosen) {
              std::vector<Composition> seen;  // shard orders often make no difference
              for (size_t precedence = 0; precedence < compositions.num_orders(); ++precedence) {
                auto composition = compositions.composition(chosen, compositions.precedences()[precedence]);
                if (std::ranges::find(seen, composition) != seen.end()) {
                  continue;
                }
                seen.push_back(composition);
                if (compositions.is_legal(composition)) {
                  priced.sharpened(precedence, chosen, 0, kImpossible);
                  const bool moves = compositions.moves(composition);
                  choices.push_back({std::move(composition), priced.of_inputs(precedence, chosen), moves});
                }
              }
              return false;
            });
  return choices;
}

}  // namespace funcol
