#include "planner/estimate.h"

#include <algorithm>
#include <limits>

namespace funcol {

Estimate::Estimate(const Space& space, const Costs& costs)
    : space_(space),
      latencies_(all_shares(space, costs, 0)),
      prices_(all_shares(space, costs, space.least_bytes())),
      dst_(space.held(space.dst())),
      us_per_byte_(costs.least_us_per_byte()) {
  for (size_t dim = 0; dim < is_inner_.size(); ++dim) {
    is_inner_.at(dim) = space.is_inner(static_cast<int64_t>(dim));
  }
}

Estimate::AllShares Estimate::all_shares(const Space& space, const Costs& costs, int64_t bytes) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  constexpr Share kNoShare{kNever, kNever};
  AllShares all;
  all.fill({kNoShare, kNoShare, kNoShare, kNever, kNever});
  for (const auto& unit : space.units()) {
    const int num = std::popcount(unit.slots);
    const auto lower = [&](double& share, StepKind kind, int64_t whole, int64_t copied) {
      share = std::min(share, costs.of({kind, unit.axes, bytes, bytes, whole, copied}) / num);
    };
    const auto lower_both = [&](Share& share, StepKind kind, int64_t whole) {
      lower(share.in_order, kind, whole, 0);
      lower(share.copied, kind, whole, bytes);
    };
    const int64_t gathered = bytes * space.num_ranks(unit.slots);
    for (int slot = 0; slot < space.num_slots(); ++slot) {
      if ((unit.slots >> slot & 1) == 0) {
        continue;
      }
      auto& shares = all.at(slot);
      lower_both(shares.gather, StepKind::kAllGather, gathered);
      lower_both(shares.scatter, StepKind::kReduceScatter, gathered);
      lower_both(shares.move, StepKind::kAllToAll, bytes);
      lower(shares.all_reduce, StepKind::kAllReduce, bytes, 0);
      lower(shares.exchange, StepKind::kPermute, bytes, 0);
      // One axis alone is exchanged too, where its split factor changes; several may be where a dim stays in
      // order.
      lower(shares.exchange, StepKind::kAllToAll, bytes, 0);
    }
  }
  return all;
}

double Estimate::of(const State& state, const Held& held) const {
  const uint32_t stays = in_place(state, held);
  return std::max(sum(prices_, state, stays),
                  sum(latencies_, state, stays) + us_per_byte_ * missing_bytes(state, held));
}

uint32_t Estimate::in_place(const State& state, const Held& held) const {
  const State& dst = space_.dst();
  uint32_t in_place = 0;
  for (int dim = 0; dim < kMaxDims; ++dim) {
    const int num = std::min(held.num_cuts.at(dim), dst_.num_cuts.at(dim));
    for (int i = 0; i < num; ++i) {
      const int slot = held.cuts.at(dim).at(i);
      if (slot != dst_.cuts.at(dim).at(i) || state.split.at(slot) != dst.split.at(slot)) {
        break;
      }
      in_place |= uint32_t{1} << slot;
    }
  }
  return in_place;
}

double Estimate::sum(const AllShares& shares, const State& state, uint32_t in_place) const {
  double sum = 0;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    sum += of_axis(shares.at(slot), state, slot, (in_place >> slot & 1) != 0);
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
    // Scattered along any dim, then gathered from there.
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
    // By way of another dim it is moved first, at no less than a gather from there.
    return std::min({gather, shares.exchange, leave + std::min(shares.gather.in_order, shares.exchange)});
  }
  // It has to leave the dim and come back, or goes to another one.
  return from == to ? std::min({2 * leave, gather, shares.exchange})
                    : std::min({shares.move.of(inner || is_inner_.at(to)), gather, shares.exchange,
                                leave + std::min(shares.move.of(is_inner_.at(to)), shares.exchange)});
}

double Estimate::missing_bytes(const State& state, const Held& held) const {
  bool reduces = false;
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    const bool to_partial = space_.dst().is_partial(slot) && !state.is_partial(slot);
    if (to_partial) {
      return 0;  // neutral elements need not be received
    }
    reduces |= state.is_partial(slot) && state.place.at(slot) != space_.dst().place.at(slot);
  }
  if (reduces) {
    return static_cast<double>(dst_.bytes);
  }
  int64_t common = dst_.bytes;
  for (size_t dim = 0; dim < held.sizes.size() && common > 0; ++dim) {
    if (held.sizes.at(dim) < dst_.sizes.at(dim)) {
      common = common / dst_.sizes.at(dim) * held.sizes.at(dim);
    }
  }
  return static_cast<double>(dst_.bytes - common);
}

}  // namespace funcol
