#include "propagation/upstream_plans.h"

#include <algorithm>
#include <utility>

#include "layout/hash.h"

namespace funcol {
namespace {

bool is_plain_partial(const Placement& placement) {
  return placement.is_partial() && placement.mask == 0 && !placement.is_norm();
}

}  // namespace

size_t UpstreamPlans::StateHash::operator()(const State& state) const {
  Hash hash;
  for (size_t axis = 0; axis < kMostAxes; ++axis) {
    hash.add(static_cast<uint64_t>(state.place.at(axis)) << 8 | state.position.at(axis));
  }
  return hash.value();
}

UpstreamPlans::UpstreamPlans(const TensorMeta& meta, const Layout& source, std::vector<Placement> targets,
                             const std::vector<RingAxis>& rings)
    : num_dims_(meta.num_dims()),
      bytes_(static_cast<double>(num_elements(meta.shape) * itemsize(meta.dtype))),
      rings_(rings) {
  placements_.push_back(Placement::replicate());
  for (int64_t dim = 0; dim < num_dims_; ++dim) {
    placements_.push_back(Placement::shard(dim));
  }
  targets.insert(targets.begin(), source.placements.begin(), source.placements.end());
  for (const auto& placement : targets) {
    // PyTorch makes plain partials of each reduction that it meets, such as that of a masked one.
    if (placement.is_partial() && !is_plain_partial(placement)) {
      targets.push_back(Placement::partial(placement.op));
      break;
    }
  }
  for (const auto& placement : targets) {
    if (std::ranges::find(placements_, placement) == placements_.end()) {
      placements_.push_back(placement);
    }
  }
  const auto state = state_of(source.placements, source.order);
  queue_.push({0, counter_++, state, 0, gb_of(state)});
}

uint8_t UpstreamPlans::number_of(const Placement& placement) const {
  return static_cast<uint8_t>(std::ranges::find(placements_, placement) - placements_.begin());
}

UpstreamPlans::State UpstreamPlans::state_of(const std::vector<Placement>& placements,
                                             const ShardOrder& order) const {
  State state;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    state.place.at(axis) = number_of(placements[axis]);
  }
  for (const auto& axes : order) {
    for (size_t i = 0; i < axes.size(); ++i) {
      state.position.at(axes[i]) = static_cast<uint8_t>(i);
    }
  }
  return state;
}

std::pair<uint8_t, size_t> UpstreamPlans::cuts(const State& state, int64_t dim) const {
  uint8_t count = 0;
  size_t last = 0;
  for (size_t axis = 0; axis < rings_.size(); ++axis) {
    const auto& placement = at(state, axis);
    if (placement.is_shard() && placement.dim == dim) {
      last = count == 0 || state.position.at(axis) > state.position.at(last) ? axis : last;
      ++count;
    }
  }
  return {count, last};
}

UpstreamPlans::State UpstreamPlans::moved(State state, size_t axis, size_t place) const {
  const auto& placement = placements_[place];
  state.position.at(axis) = placement.is_shard() ? cuts(state, placement.dim).first : uint8_t{0};
  state.place.at(axis) = static_cast<uint8_t>(place);
  return state;
}

bool UpstreamPlans::may_be_partial(const State& state, size_t axis, const Placement& placement) const {
  for (size_t other = 0; other < rings_.size(); ++other) {
    const auto& held = at(state, other);
    if (other != axis && held.is_partial() && !commute(held.op, placement.op)) {
      return false;
    }
  }
  return true;
}

double UpstreamPlans::gb_of(const State& state) const {
  double num_shards = 1;
  for (size_t axis = 0; axis < rings_.size(); ++axis) {
    num_shards *= at(state, axis).is_shard() ? rings_[axis].num_ranks : 1;
  }
  return bytes_ / num_shards / 1024 / 1024 / 1024;
}

void UpstreamPlans::add(const Entry& from, size_t axis, size_t place) {
  const auto state = moved(from.state, axis, place);
  if (prices_.contains(state)) {
    return;
  }
  const auto& before = at(from.state, axis);
  const auto& after = placements_[place];
  const double searched = dtensor_step(before, after, gb_of(from.state), rings_[axis]).cost_us;
  const auto priced = dtensor_step(before, after, from.gb, rings_[axis]);
  queue_.push({from.cost + searched, counter_++, state, from.price + priced.cost_us, priced.gb});
}

// Adds the steps that gather the last axis that cuts each dim, for strided shards or for plain ones.
void UpstreamPlans::expand_shards(const Entry& from, bool are_strided) {
  for (int64_t dim = 0; dim < num_dims_; ++dim) {
    const auto [count, last] = cuts(from.state, dim);
    if (count > 0 && at(from.state, last).is_strided() == are_strided) {
      add(from, last, 0);
    }
  }
}

// Adds all steps from a state, in PyTorch's order.
void UpstreamPlans::expand(const Entry& from) {
  const auto num_shards = static_cast<size_t>(num_dims_);
  for (int64_t dim = 0; dim < num_dims_; ++dim) {
    const auto [count, last] = cuts(from.state, dim);
    for (size_t to = 0; count > 0 && !at(from.state, last).is_strided() && to < num_shards; ++to) {
      if (static_cast<int64_t>(to) != dim) {
        add(from, last, 1 + to);
      }
    }
  }
  expand_shards(from, false);
  for (size_t axis = 0; axis < rings_.size(); ++axis) {
    if (at(from.state, axis).is_partial()) {
      add(from, axis, 0);
    }
  }
  for (const bool of_partials : {false, true}) {
    for (size_t axis = 0; axis < rings_.size(); ++axis) {
      const auto& held = at(from.state, axis);
      for (size_t dim = 0; (of_partials ? held.is_partial() : held.is_replicate()) && dim < num_shards;
           ++dim) {
        add(from, axis, 1 + dim);
      }
    }
  }
  const auto make = [&](auto is_made) {
    for (size_t axis = 0; axis < rings_.size(); ++axis) {
      for (size_t place = 1 + num_shards; at(from.state, axis).is_replicate() && place < placements_.size();
           ++place) {
        if (is_made(axis, placements_[place])) {
          add(from, axis, place);
        }
      }
    }
  };
  make([&](size_t axis, const Placement& placement) {
    return is_plain_partial(placement) && may_be_partial(from.state, axis, placement);
  });
  expand_shards(from, true);
  make([](size_t, const Placement& placement) { return placement.is_strided(); });
}

bool UpstreamPlans::settle() {
  while (!queue_.empty()) {
    const Entry next = queue_.top();
    queue_.pop();
    if (prices_.emplace(next.state, next.price).second) {
      expand(next);
      return true;
    }
  }
  return false;
}

double UpstreamPlans::cost_to(const std::vector<Placement>& target) {
  const auto state = state_of(target, default_shard_order(target));
  while (true) {
    if (const auto known = prices_.find(state); known != prices_.end()) {
      return known->second;
    }
    if (!settle()) {
      return kImpossible;
    }
  }
}

}  // namespace funcol
