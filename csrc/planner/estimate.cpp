#include "planner/estimate.h"

#include <algorithm>

namespace funcol {
namespace {

constexpr int kFewSlots = 3;

}  // namespace

Estimate::Estimate(const Space& space, const Costs& costs)
    : space_(space),
      charges_cycles_(
          space.num_slots() > kFewSlots && !space.has_strided_shards() &&
          std::ranges::all_of(space.slot_groups(), [](const auto& group) { return group.list.size() == 1; })),
      latencies_(all_shares(costs, 0)),
      prices_(all_shares(costs, space.least_bytes())),
      dst_(space.largest_shard(space.dst())),
      us_per_byte_(costs.least_us_per_byte()) {
  for (int slot = 0; slot < space.num_slots(); ++slot) {
    dst_has_partials_ |= space.dst().is_partial(slot);
  }
  for (size_t dim = 0; dim < is_inner_.size(); ++dim) {
    is_inner_.at(dim) = space.is_inner(static_cast<int64_t>(dim));
  }
}

Estimate::AllShares Estimate::all_shares(const Costs& costs, int64_t bytes) const {
  constexpr Share kNoShare{kImpossible, kImpossible, kImpossible};
  AllShares all;
  all.fill({kNoShare, kNoShare, kNoShare, kImpossible, kImpossible});
  for (const auto& group : space_.slot_groups()) {
    const int num = num_axes(group.slots);
    const auto lower = [&](double& share, StepKind kind, int64_t full, int64_t copied) {
      share = std::min(share, costs.of({kind, group.axes, bytes, bytes, full, copied}) / num);
    };
    const auto lower_all = [&](Share& share, StepKind kind, int64_t full) {
      for (size_t num_copies = 0; num_copies < share.size(); ++num_copies) {
        lower(share.at(num_copies), kind, full, static_cast<int64_t>(num_copies) * bytes);
      }
    };
    const int64_t gathered = bytes * space_.num_ranks(group.slots);
    for (int slot = 0; slot < space_.num_slots(); ++slot) {
      if (!contains(group.slots, slot)) {
        continue;
      }
      auto& shares = all.at(slot);
      lower_all(shares.gather, StepKind::kAllGather, gathered);
      lower_all(shares.scatter, StepKind::kReduceScatter, gathered);
      lower_all(shares.move, StepKind::kAllToAll, bytes);
      lower(shares.all_reduce, StepKind::kAllReduce, bytes, 0);
      if (charges_cycles_) {
        continue;  // no step is an exchange
      }
      lower(shares.exchange, StepKind::kPermute, bytes, 0);
      // An exchange is an all_to_all if one axis changes its split factor, or if several axes stay on a dim.
      lower(shares.exchange, StepKind::kAllToAll, bytes, 0);
    }
  }
  return all;
}

double Estimate::of(const State& state, const LargestShard& shard) const {
  const uint32_t unmoved = in_place(state, shard);
  const Cycles moving = charges_cycles_ ? cycles(state) : Cycles{};
  return std::max(sum(prices_, state, unmoved, moving),
                  sum(latencies_, state, unmoved, moving) + us_per_byte_ * missing_bytes(state, shard));
}

uint32_t Estimate::in_place(const State& state, const LargestShard& shard) const {
  const State& dst = space_.dst();
  uint32_t in_place = 0;
  for (int dim = 0; dim < kMaxDims; ++dim) {
    const int num = std::min(shard.num_cuts.at(dim), dst_.num_cuts.at(dim));
    for (int i = 0; i < num; ++i) {
      const int slot = shard.cuts.at(dim).at(i);
      if (slot != dst_.cuts.at(dim).at(i) || state.split.at(slot) != dst.split.at(slot)) {
        break;
      }
      in_place |= axis_set(slot);
    }
  }
  return in_place;
}

double Estimate::sum(const AllShares& shares, const State& state, uint32_t in_place,
                     const Cycles& cycles) const {
  double sum = 0;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    sum += of_axis(shares.at(slot), state, slot, contains(in_place, slot));
  }
  for (size_t i = 0; i < cycles.num; ++i) {
    sum += detour(shares, state, cycles.slots.at(i));
  }
  return sum;
}

double Estimate::of_axis(const Shares& shares, const State& state, int slot, bool in_place) const {
  const State& dst = space_.dst();
  const uint8_t from = state.place.at(slot);
  const uint8_t to = dst.place.at(slot);
  if (state.is_partial(slot)) {
    if (from == to) {
      return 0;
    }
    // By way of a shard: scattered along any dim, then gathered.
    const double both = shares.scatter[0] + std::min(shares.gather[0], shares.exchange);
    return dst.is_replicate(slot) ? std::min(shares.all_reduce, both)
                                  : std::min(shares.all_reduce, shares.scatter[0]);
  }
  if (state.is_replicate(slot) || in_place || dst.is_partial(slot)) {
    return 0;
  }
  const size_t copies_from = is_inner_.at(from) ? 1 : 0;
  const double gather = shares.gather.at(copies_from);
  const double leave = std::min(shares.move.at(copies_from), shares.exchange);
  if (dst.is_replicate(slot)) {
    // By way of another dim: moved there, then gathered.
    return std::min({gather, shares.exchange, leave + std::min(shares.gather[0], shares.exchange)});
  }
  // The cut leaves its dim and comes back, or moves to another dim.
  if (from == to) {
    return std::min({2 * leave, gather, shares.exchange});
  }
  const size_t copies_to = is_inner_.at(to) ? 1 : 0;
  return std::min({shares.move.at(copies_from + copies_to), gather, shares.exchange,
                   leave + std::min(shares.move.at(copies_to), shares.exchange)});
}

double Estimate::detour(const AllShares& all, const State& state, uint32_t slots) const {
  double least = kImpossible;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    if (!contains(slots, slot)) {
      continue;
    }
    const auto& shares = all.at(slot);
    const size_t copies_from = is_inner_.at(state.place.at(slot)) ? 1 : 0;
    const size_t copies_to = is_inner_.at(space_.dst().place.at(slot)) ? 1 : 0;
    const double around =
        std::min(shares.gather.at(copies_from), shares.move.at(copies_from) + shares.move.at(copies_to));
    least = std::min(least, around - std::min(around, shares.move.at(copies_from + copies_to)));
  }
  return least;
}

Estimate::Cycles Estimate::cycles(const State& state) const {
  const State& dst = space_.dst();
  std::array<uint32_t, kMaxDims> leaving{};  // the slots that leave each dim for another one
  uint32_t moving = 0;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    if (state.is_shard(slot) && dst.is_shard(slot) && state.place.at(slot) != dst.place.at(slot)) {
      leaving.at(state.place.at(slot)) |= axis_set(slot);
      moving |= axis_set(slot);
    }
  }
  // The slots that have to leave before a slot arrives: those that leave its new dim, and those before them.
  std::array<uint32_t, kMaxSlots> before{};
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    before.at(slot) = contains(moving, slot) ? leaving.at(dst.place.at(slot)) : 0;
  }
  for (int via = 0; via < space_.num_slots(); ++via) {
    for (auto& slots : before) {
      slots |= contains(slots, via) ? before.at(via) : 0;
    }
  }
  Cycles cycles;
  uint32_t seen = 0;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    if (!contains(before.at(slot), slot) || contains(seen, slot)) {
      continue;
    }
    uint32_t cycle = 0;
    for (int other = slot; other < space_.num_slots(); ++other) {
      const bool is_mutual = contains(before.at(slot), other) && contains(before.at(other), slot);
      cycle |= is_mutual ? axis_set(other) : 0;
    }
    seen |= cycle;
    cycles.slots.at(cycles.num++) = cycle;
  }
  return cycles;
}

double Estimate::missing_bytes(const State& state, const LargestShard& shard) const {
  if (dst_has_partials_) {
    // Neutral elements are made locally. A partial that is kept can be scattered, moved as a shard, and
    // embedded.
    return 0;
  }
  bool reduces = false;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    reduces |= state.is_partial(slot);
  }
  if (reduces) {
    return static_cast<double>(dst_.bytes);
  }
  int64_t common = dst_.bytes;
  for (size_t dim = 0; dim < shard.sizes.size() && common > 0; ++dim) {
    if (shard.sizes.at(dim) < dst_.sizes.at(dim)) {
      common = common / dst_.sizes.at(dim) * shard.sizes.at(dim);
    }
  }
  return static_cast<double>(dst_.bytes - common);
}

}  // namespace funcol
