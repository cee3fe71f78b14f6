// What it costs one input to be where rows ask for it, when the rows of only the first axes are known.
#pragma once

#include <cstdint>
#include <limits>
#include <queue>
#include <span>
#include <unordered_map>
#include <vector>

#include "planner/reach.h"
#include "propagation/candidates.h"

namespace funcol {

// Of an input: for an order of cuts and rows of the first axes ("prefix"), the least cost of a layout that
// some rows of the other axes ask for. Layouts are taken in from the nearest to the farthest: the first that
// fits a prefix is its least. A layout with a mask on an axis comes behind the one that replicates there, by
// what it costs to make the mask.
class PrefixCosts {
 public:
  using RowNumber = Candidates::RowNumber;

  // Both outlive this.
  PrefixCosts(const Candidates& candidates, size_t input, Reach& reach);

  // The least cost if it is known, else a bound: what the nearest layout costs that is not taken in yet.
  double at_least(size_t precedence, std::span<const RowNumber> rows) const {
    const double known = get(key(precedence, rows));
    return known >= 0 ? known : radius_;
  }
  // Whether that is the cost; also if it is known that there is no way.
  bool is_exact(size_t precedence, std::span<const RowNumber> rows) const {
    return get(key(precedence, rows)) >= 0 || radius_ == std::numeric_limits<double>::infinity();
  }

  // Takes in the next layout. Not when all are.
  void extend();

 private:
  static constexpr double kUnknown = -1;

  struct Column {
    Placement placement;
    uint8_t place;  // of State
    uint8_t split;
    bool makes_mask;
  };
  struct Masked {
    double cost;
    State replicated;  // but for the mask on some axis

    bool operator<(const Masked& other) const { return cost > other.cost; }
  };
  // Placements that rows have on an axis.
  struct Axis {
    int slot;
    std::vector<Column> columns;
    std::vector<uint32_t> column_of;  // [row]
    uint64_t first_key;               // of prefixes that end before the axis
  };

  static constexpr int64_t kNoAxis = -1;

  void add_axis(int64_t axis, uint64_t first_key);
  void take_in(const State& state, double cost, int64_t masked_axis);
  uint64_t key(size_t precedence, std::span<const RowNumber> rows) const;
  double get(uint64_t key) const;
  void set(uint64_t key, double cost);
  bool is_cut_by(const State& state, size_t precedence) const;
  // Sets all prefixes of which every column fits.
  template <typename Fits>
  bool take_in(size_t axis, uint64_t prefix, double cost, const Fits& fits);

  const Candidates& candidates_;
  const size_t input_;
  Reach& reach_;
  size_t num_taken_in_ = 0;             // of the layouts without masks
  std::vector<int64_t> maskable_axes_;  // on which a mask may be made
  std::priority_queue<Masked> masked_;  // not taken in yet
  double radius_ = 0;
  std::vector<Axis> axes_;
  std::vector<std::vector<int64_t>> rank_of_;  // [precedence][axis]
  std::vector<double> dense_;                  // by key, unless there are too many
  std::unordered_map<uint64_t, double> sparse_;
  uint64_t first_whole_key_ = 0;  // of prefixes with a row for each axis
};

}  // namespace funcol
