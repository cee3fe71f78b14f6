// The search over the compositions of a rule: a row for each mesh axis, all in one shard order.
//
// A space lists the compositions:
//
//   size_t num_axes() const;
//   size_t num_orders() const;                                // shard orders
//   const std::vector<RowNumber>& rows_of(size_t axis) const; // ascending
//   // Returns false only if no composition is legal that begins with `rows`, on the first axes, and `next`.
//   bool may_follow(RowNumbers rows, RowNumber next) const;
//
// The order of the full product: by the row of the first axis, then of the next axis, ..., then by the shard
// order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "planner/dtensor_costs.h"

namespace funcol {

using RowNumber = int32_t;
using RowNumbers = std::span<const RowNumber>;

enum class Direction : uint8_t { kForward, kBackward };

// Depth-first search for a composition, in the order of the full product or backwards, without shard orders.
template <typename Space>
class RowProduct {
 public:
  explicit RowProduct(const Space& space, Direction direction = Direction::kForward)
      : space_(space), direction_(direction) {}

  // Calls visit(rows) for each composition of rows that may follow each other and of which takes(axis, row)
  // holds, until visit() returns true. Returns true if it did.
  template <typename IsCandidate, typename Visit>
  bool find(const IsCandidate& is_candidate, const Visit& visit) {
    if (rows_.size() == space_.num_axes()) {
      return visit(RowNumbers(rows_));
    }
    const auto axis = rows_.size();
    const auto& numbers = space_.rows_of(axis);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto number = direction_ == Direction::kForward ? numbers[i] : numbers[numbers.size() - 1 - i];
      if (!is_candidate(axis, number) || !space_.may_follow(rows_, number)) {
        continue;
      }
      rows_.push_back(number);
      const bool is_found = find(is_candidate, visit);
      rows_.pop_back();
      if (is_found) {
        return true;
      }
    }
    return false;
  }

 private:
  const Space& space_;
  const Direction direction_;
  std::vector<RowNumber> rows_;
};

// A lower bound of the cost of all compositions with these first rows; exact if no pricing would raise it.
struct RowBound {
  double cost;
  bool is_exact;
};

// Best-first search for the cheapest composition. A node has a shard order and the rows of the first axes.
// Its bound is never above the cost of a composition that begins with these. Pricing gives the bounds:
//
//   double at_least(size_t order, RowNumbers rows) const;
//   // Works on a bound until it is exact or certain to exceed `limit`.
//   RowBound sharpened(size_t order, RowNumbers rows, double bound, double limit);
//
// Of equal costs the first in the order of the full product is found.
template <typename Space, typename Pricing>
class RowSearch {
 public:
  RowSearch(const Space& space, Pricing& pricing)
      : space_(space), num_axes_(space.num_axes()), pricing_(pricing) {}

  // Calls accept(order, rows) for compositions, the cheapest first, until it returns true. Returns true if it
  // did. Compositions of the cost kImpossible are left out.
  template <typename Accept>
  bool find(const Accept& accept) {
    for (size_t order = 0; order < space_.num_orders(); ++order) {
      nodes_.push_back({order, 0});
      rows_.resize(nodes_.size() * num_axes_, 0);
      push(order, pricing_.at_least(order, {}));
    }
    while (!queue_.empty()) {
      const auto [bound, node] = pop();
      const auto [order, num_rows] = nodes_[node];
      const double limit = queue_.empty() ? kImpossible : queue_.front().bound;
      const auto sharper = pricing_.sharpened(order, rows(node), bound, limit);
      if (!sharper.is_exact || sharper.cost > bound) {
        push(node, sharper.cost);
      } else if (num_rows < num_axes_) {
        expand(node);
      } else if (accept(order, rows(node))) {
        return true;
      }
    }
    return false;
  }

 private:
  struct Node {
    size_t order;
    size_t num_rows;
  };
  struct Entry {
    double bound;
    size_t node;
  };

  RowNumbers rows(size_t node) const { return {rows_.data() + node * num_axes_, nodes_[node].num_rows}; }

  void expand(size_t node) {
    const auto [order, num_rows] = nodes_[node];
    for (const RowNumber number : space_.rows_of(num_rows)) {
      if (space_.may_follow(rows(node), number)) {
        const size_t child = nodes_.size();
        nodes_.push_back({order, num_rows + 1});
        rows_.resize(nodes_.size() * num_axes_, 0);
        std::copy_n(rows_.begin() + static_cast<std::ptrdiff_t>(node * num_axes_), num_rows,
                    rows_.begin() + static_cast<std::ptrdiff_t>(child * num_axes_));
        rows_[child * num_axes_ + num_rows] = number;
        push(child, pricing_.at_least(order, rows(child)));
      }
    }
  }

  // Orders nodes by bound, then by the full product. Rows that are not chosen yet are 0, so a node comes
  // where its first composition may come.
  bool is_later(const Entry& a, const Entry& b) const {
    if (a.bound != b.bound) {
      return a.bound > b.bound;
    }
    const std::span<const RowNumber> rows_a(rows_.data() + a.node * num_axes_, num_axes_);
    const std::span<const RowNumber> rows_b(rows_.data() + b.node * num_axes_, num_axes_);
    const auto order =
        std::lexicographical_compare_three_way(rows_a.begin(), rows_a.end(), rows_b.begin(), rows_b.end());
    return order == 0 ? nodes_[a.node].order > nodes_[b.node].order : order > 0;
  }

  void push(size_t node, double bound) {
    if (bound != kImpossible) {
      queue_.push_back({bound, node});
      std::ranges::push_heap(queue_, [this](const Entry& a, const Entry& b) { return is_later(a, b); });
    }
  }

  Entry pop() {
    std::ranges::pop_heap(queue_, [this](const Entry& a, const Entry& b) { return is_later(a, b); });
    const Entry entry = queue_.back();
    queue_.pop_back();
    return entry;
  }

  const Space& space_;
  const size_t num_axes_;
  Pricing& pricing_;
  std::vector<Node> nodes_;
  std::vector<RowNumber> rows_;  // [node][axis]
  std::vector<Entry> queue_;     // a heap
};

}  // namespace funcol
