// A lower bound of the remaining cost from a state to the target: the heuristic of the A* search.
//
// The bound is the larger of two sums over the axes whose placement has to change. Each such axis is charged
// its share of the cheapest step that can change it so; a step over several axes is shared by them. The first
// sum prices a step by the fewest bytes that a rank can hold: those it holds when every axis cuts the tensor.
// The second sum counts latencies alone, and adds the bytes that the first rank still has to receive at the
// lowest price of a byte.
//
// Where every step runs over one axis, cuts that move in a cycle, such as S(0)S(1) -> S(1)S(0), cannot all
// take the direct step: it adds a cut behind the cuts of the new dim, and only the last cut of a dim can
// leave. Each cycle is charged the cheapest detour of one of its axes. Searches over few axes are short
// without this.
#pragma once

#include "planner/state.h"

namespace funcol {

class Estimate {
 public:
  Estimate(const Space& space, const Costs& costs);

  double of(const State& state, const LargestShard& shard) const;

 private:
  // The share of one axis in the cheapest step of a kind, by the number of tensors (input, output) that are
  // copied to another memory order.
  using Share = std::array<double, 3>;
  struct Shares {
    Share gather;
    Share scatter;
    Share move;  // to another dim
    double all_reduce = 0;
    double exchange = 0;  // over several axes at once
  };
  using AllShares = std::array<Shares, kMaxSlots>;
  // Sets of slots whose cuts move in a cycle: each to a dim that a cut of the same set leaves.
  struct Cycles {
    std::array<uint32_t, kMaxSlots / 2> slots{};
    size_t num = 0;
  };

  // Returns the shares of steps on ranks that hold `bytes`; 0 counts latencies alone.
  AllShares all_shares(const Costs& costs, int64_t bytes) const;
  double sum(const AllShares& shares, const State& state, uint32_t in_place, const Cycles& cycles) const;
  double of_axis(const Shares& shares, const State& state, int slot, bool in_place) const;
  // Returns the least that one of `slots`, which move in a cycle, costs beyond its direct step.
  double detour(const AllShares& shares, const State& state, uint32_t slots) const;
  Cycles cycles(const State& state) const;
  // Returns the slots whose cut of a dim, and all earlier cuts of that dim, are those of dst.
  uint32_t in_place(const State& state, const LargestShard& shard) const;
  double missing_bytes(const State& state, const LargestShard& shard) const;

  const Space& space_;
  const bool charges_cycles_;
  AllShares latencies_;
  AllShares prices_;
  LargestShard dst_;
  bool dst_has_partials_ = false;
  std::array<bool, kMaxDims> is_inner_{};  // Space::is_inner of each dim
  double us_per_byte_;
};

}  // namespace funcol
