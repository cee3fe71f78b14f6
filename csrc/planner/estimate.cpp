#include "planner/estimate.h"

#include <algorithm>
#include <limits>

namespace funcol {

Estimate::Estimate(const Space& space, const Costs& costs)
    : space_(space), shares_{}, dst_(space.held(space.dst())), us_per_byte_(costs.least_us_per_byte()) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  shares_.fill({kNever, kNever, kNever, kNever, kNever});
  for (const auto& unit : space.units()) {
    const int num = std::popcount(unit.slots);
    const auto share = [&](StepKind kind) { return costs.latency(kind, unit.axes) / num; };
    for (int slot = 0; slot < space.num_slots(); ++slot) {
      if ((unit.slots >> slot & 1) == 0) {
        continue;
      }
      auto& shares = shares_.at(slot);
      shares.gather = std::min(shares.gather, share(StepKind::kAllGather));
      shares.scatter = std::min(shares.scatter, share(StepKind::kReduceScatter));
      shares.all_reduce = std::min(shares.all_reduce, share(StepKind::kAllReduce));
      shares.move = std::min(shares.move, share(StepKind::kAllToAll));
      // One axis alone is exchanged too, where its split factor changes.
      shares.exchange = std::min({shares.exchange, share(StepKind::kAllToAll), share(StepKind::kPermute)});
    }
  }
  for (auto& shares : shares_) {
    shares.move = std::min(shares.move, shares.exchange);
  }
}

double Estimate::of(const State& state, const Held& held) const {
  return latency(state, held) + us_per_byte_ * missing_bytes(state, held);
}

double Estimate::latency(const State& state, const Held& held) const {
  double sum = 0;
  const State& dst = space_.dst();
  uint32_t in_place = 0;  // cuts that may stay: those before them are those of dst
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
  for (int slot = 0; slot < space_.num_slots(); ++slot) {
    sum += of_axis(state, slot, (in_place >> slot & 1) != 0);
  }
  return sum;
}

double Estimate::of_axis(const State& state, int slot, bool in_place) const {
  const State& dst = space_.dst();
  const auto& shares = shares_.at(slot);
  const double to_replicate = std::min(shares.gather, shares.exchange);
  if (state.is_partial(slot)) {
    if (state.place.at(slot) == dst.place.at(slot)) {
      return 0;
    }
    return dst.is_replicate(slot) ? std::min(shares.all_reduce, shares.scatter + to_replicate)
                                  : std::min(shares.all_reduce, shares.scatter);
  }
  if (state.is_replicate(slot) || in_place || dst.is_partial(slot)) {
    return 0;
  }
  if (dst.is_replicate(slot)) {
    return to_replicate;
  }
  // It has to leave the dim and come back, or goes to another one.
  return dst.place.at(slot) == state.place.at(slot)
             ? std::min({2 * shares.move, shares.gather, shares.exchange})
             : std::min(shares.move, shares.gather);
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
