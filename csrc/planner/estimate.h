// Never more than what is left to pay: the larger of two sums.
//
// Each axis whose placement has to change is charged its share of the cheapest steps that change it so; a
// step over several axes is shared by them. One sum prices such a step by the fewest bytes that a rank can
// hold on the way, when every axis cuts the tensor. The other counts its latency alone, and adds the bytes
// that the first rank has to hold in the end and cannot have yet, at the best price of a byte.
#pragma once

#include "planner/state.h"

namespace funcol {

class Estimate {
 public:
  Estimate(const Space& space, const Costs& costs);

  double of(const State& state, const Held& held) const;

 private:
  // An axis' share of the cheapest step of a kind: where the layout of the tensor may stay, and where it
  // cannot.
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
    double exchange = 0;  // together with other axes
  };
  using AllShares = std::array<Shares, kMaxSlots>;

  // For ranks that hold `bytes`, or for the latency alone if that is 0.
  static AllShares all_shares(const Space& space, const Costs& costs, int64_t bytes);
  double sum(const AllShares& shares, const State& state, uint32_t in_place) const;
  double of_axis(const Shares& shares, const State& state, int slot, bool in_place) const;
  // The slots whose cuts may stay: those before them are those of dst.
  uint32_t in_place(const State& state, const Held& held) const;
  double missing_bytes(const State& state, const Held& held) const;

  const Space& space_;
  AllShares latencies_;
  AllShares prices_;
  Held dst_;
  std::array<bool, kMaxDims> is_inner_{};  // however the dims before it are cut, they are not one long
  double us_per_byte_;
};

}  // namespace funcol
