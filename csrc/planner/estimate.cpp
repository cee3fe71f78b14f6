#include "planner/estimate.h"

#include <algorithm>

namespace funcol {

Estimate::Estimate(const Space& space, const Costs& costs)
    : space_(space),
      latencies_(all_shares(space, costs, 0)),
      prices_(all_shares(space, costs, space.least_bytes())),
      dst_(space.largest_shard(space.dst())),
      us_per_byte_(costs.least_us_per_byte()) {
  for (int slot = 0; slot < space.num_slots(); ++slot) {
    dst_has_partials_ |= space.dst().is_partial(slot);
  }
  for (size_t dim = 0; dim < is_inner_.size(); ++dim) {
    is_inner_.at(dim) = space.is_inner(static_cast<int64_t>(dim));
  }
}

Estimate::AllShares Estimate::all_shares(const Space& space, const Costs& costs, int64_t bytes) {
  constexpr Share kNoShare{kImpossible, kImpossible};
  AllShares all;
  all.fill({kNoShare, kNoShare, kNoShare, kImpossible, kImpossible});
  for (const auto& group : space.slot_groups()) {
    const int num = num_axes(group.slots);
    const auto lower = [&](double& share, StepKind kind, int64_t whole, int64_t copied) {
      share = std::min(share, costs.of({kind, group.axes, bytes, bytes, whole, copied}) / num);
    };
    const auto lower_both = [&](Share& share, StepKind kind, int64_t whole) {
      lower(share.in_order, kind, whole, 0);
      lower(share.copied, kind, whole, bytes);
    };
    const int64_t gathered = bytes * space.num_ranks(group.slots);
    for (int slot = 0; slot < space.num_slots(); ++slot) {
      if (!contains(group.slots, slot)) {
        continue;
      }
      auto& shares = all.at(slot);
      lower_both(shares.gather, StepKind::kAllGather, gathered);
      lower_both(shares.scatter, StepKind::kReduceScatter, gathered);
      lower_both(shares.move, StepKind::kAllToAll, bytes);
      lower(shares.all_reduce, StepKind::kAllReduce, bytes, 0);
      lower(shares.exchange, StepKind::kPermute, bytes, 0);
      // An exchange is an all_to_all if one axis changes its split factor, or if several axes stay on a dim.
      lower(shares.exchange, StepKind::kAllToAll, bytes, 0);
    }
  }
  return all;
}

double Estimate::of(const State& state, const LargestShard& shard) const {
  const uint32_t stays = in_place(state, shard);
  return std::max(sum(prices_, state, stays),
                  sum(latencies_, state, stays) + us_per_byte_ * missing_bytes(state, shard));
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

double Estimate::sum(const AllShares& shares, const State& state, uint32_t in_place) const {
  double sum = 0;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    sum += of_axis(shares.at(slot), state, slot, contains(in_place, slot));
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
    const double both = shares.scatter.in_order + std::min(shares.gather.in_order, shares.exchange);
    return dst.is_replicate(slot) ? std::min(shares.all_reduce, both)
                                  : std::min(shares.all_reduce, shares.scatter.in_order);
  }
  if (state.is_replicate(slot) || in_place || dst.is_partial(slot)) {
    return 0;
  }
  const bool inner = is_inner_.at(from);
  const double gather = shares.gather.of(inner);
  const double leave = std::min(shares.move.of(inner), shares.exchange);
  if (dst.is_replicate(slot)) {
    // By way of another dim: moved there, then gathered.
    return std::min({gather, shares.exchange, leave + std::min(shares.gather.in_order, shares.exchange)});
  }
  // The cut leaves its dim and comes back, or moves to another dim.
  return from == to ? std::min({2 * leave, gather, shares.exchange})
                    : std::min({shares.move.of(inner || is_inner_.at(to)), gather, shares.exchange,
                                leave + std::min(shares.move.of(is_inner_.at(to)), shares.exchange)});
}

double Estimate::missing_bytes(const State& state, const LargestShard& shard) const {
  if (dst_has_partials_) {
    // Neutral elements are made locally. A partial that stays can be scattered, moved as a shard, and
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
