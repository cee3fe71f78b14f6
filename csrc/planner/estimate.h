// A lower bound of the cost that is left from a state to the target: the heuristic of the A* search.
//
// The bound is the larger one of two sums over the axes whose placement has to change. Each such axis is
// charged its share of the cheapest step that can change it so; a step over several axes is shared by them.
// The first sum prices a step by the fewest bytes that a rank can hold: those it holds when every axis cuts
// the tensor. The second sum counts latencies alone, and adds the bytes that the first rank still has to
// receive at the lowest price of a byte.
#pragma once

#include "planner/state.h"

namespace funcol {

class Estimate {
 public:
  Estimate(const Space& space, const Costs& costs);

  double of(const State& state, const LargestShard& shard) const;

 private:
  // The share of one axis in the cheapest step of a kind, without and with a copy to another memory order.
  struct Share {
    double in_order = 0;
    double copied = 0;

    double of(bool copies) const { return copies ? copied : in_order; }
  };
  struct Shares {
    Share gather;
    Share scatter;
    Share move;  // to another dim
    double all_reduce = 0;
    double exchange = 0;  // over several axes at once
  };
  using AllShares = std::array<Shares, kMaxSlots>;

  // The shares of steps on ranks that hold `bytes`; 0 counts latencies alone.
  static AllShares all_shares(const Space& space, const Costs& costs, int64_t bytes);
  double sum(const AllShares& shares, const State& state, uint32_t in_place) const;
  double of_axis(const Shares& shares, const State& state, int slot, bool in_place) const;
  // The slots whose cuts of a dim, and all earlier cuts of it, are those of dst.
  uint32_t in_place(const State& state, const LargestShard& shard) const;
  double missing_bytes(const State& state, const LargestShard& shard) const;

  const Space& space_;
  AllShares latencies_;
  AllShares prices_;
  LargestShard dst_;
  bool dst_has_partials_ = false;
  std::array<bool, kMaxDims> is_inner_{};  // Space::is_inner of each dim
  double us_per_byte_;
};

}  // namespace funcol
