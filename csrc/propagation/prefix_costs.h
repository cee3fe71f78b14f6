// Lower bounds of the cost of one input when only the rows of the first mesh axes are chosen.
#pragma once

#include <cstdint>
#include <queue>
#include <unordered_map>
#include <vector>

#include "planner/shortest_paths.h"
#include "propagation/compositions.h"

namespace funcol {

// The least cost of a layout of the input for each prefix: a shard order and rows of the first axes, with any
// rows of the other axes. Layouts are visited from the cheapest on: the first one that fits a prefix gives
// its cost. A layout with a mask on an axis costs as much as the layout that replicates there, plus the cost
// of making the mask.
class PrefixCosts {
 public:
  // Keeps references to `compositions` and `paths`, which must outlive this.
  PrefixCosts(const Compositions& compositions, size_t input, ShortestPaths& paths);

  // Returns the least cost if it is known, else a lower bound: the cost of the next layout.
  double at_least(size_t precedence, RowNumbers rows) const {
    const double known = get(key(precedence, rows));
    return known >= 0 ? known : frontier_;
  }
  // Returns true if at_least() is the cost itself, which may be kImpossible.
  bool is_exact(size_t precedence, RowNumbers rows) const {
    return get(key(precedence, rows)) >= 0 || frontier_ == kImpossible;
  }

  // Visits the next layout. Must not be called once all are visited.
  void extend();

 private:
  static constexpr double kUnknown = -1;

  struct Column {
    Placement placement;
    uint8_t place;  // as in State
    uint8_t split;
    bool makes_mask;
  };
  struct Masked {
    double cost;
    State replicated;  // the layout, with Replicate in place of the mask

    bool operator<(const Masked& other) const { return cost > other.cost; }
  };
  // The placements of the input on one mesh axis, in any row.
  struct Axis {
    int slot;
    std::vector<Column> columns;
    std::vector<uint32_t> column_of;  // [row]
    uint64_t first_key;               // of prefixes that end before this axis
  };

  static constexpr int64_t kNoAxis = -1;

  void add_axis(int64_t axis, uint64_t first_key);
  void visit(const State& state, double cost, int64_t masked_axis);
  uint64_t key(size_t precedence, RowNumbers rows) const;
  double get(uint64_t key) const;
  void set(uint64_t key, double cost);
  bool is_cut_by(const State& state, size_t precedence) const;
  // Sets the cost of all prefixes whose columns all fit. Returns true if any prefix fits.
  template <typename Fits>
  bool visit(size_t axis, uint64_t prefix, double cost, const Fits& fits);

  const Compositions& compositions_;
  const size_t input_;
  ShortestPaths& paths_;
  size_t num_visited_ = 0;              // layouts without masks
  std::vector<int64_t> maskable_axes_;  // axes on which rows make a mask
  std::priority_queue<Masked> masked_;  // not visited yet
  double frontier_ = 0;
  std::vector<Axis> axes_;
  std::vector<std::vector<int64_t>> rank_of_;  // [precedence][axis]
  std::vector<double> dense_;                  // by key; empty if there are too many keys
  std::unordered_map<uint64_t, double> sparse_;
  uint64_t first_complete_key_ = 0;  // of prefixes with a row for every axis
};

}  // namespace funcol
