// Never more than what is left to pay.
//
// Two parts, of which a step pays both. Latency: each axis whose placement has to change is charged its share
// of the cheapest steps that change it so; a step over several axes is shared by them. Bandwidth: what the
// first rank has to hold in the end and cannot have yet, at the best price of a byte.
#pragma once

#include "planner/state.h"

namespace funcol {

class Estimate {
 public:
  Estimate(const Space& space, const Costs& costs);

  double of(const State& state, const Held& held) const;

 private:
  // An axis' share of the cheapest step of each kind.
  struct Shares {
    double gather = 0;
    double scatter = 0;
    double all_reduce = 0;
    double move = 0;      // to another dim
    double exchange = 0;  // together with other axes
  };

  double latency(const State& state, const Held& held) const;
  double of_axis(const State& state, int slot, bool in_place) const;
  double missing_bytes(const State& state, const Held& held) const;

  const Space& space_;
  std::array<Shares, kMaxSlots> shares_;
  Held dst_;
  double us_per_byte_;
};

}  // namespace funcol
