#include <algorithm>
#include <utility>

#include "planner/state.h"

namespace funcol {
namespace {

// The most axes whose joint cuts of a dim are tried in every order. More axes cut a dim only in mesh order or
// in the order in dst.
constexpr size_t kMaxSlotsPermuted = 3;

}  // namespace

// An enumerator of the steps from one state.
class Expansion {
 public:
  Expansion(const Space& space, const State& state, const LargestShard& shard, const Space::Visit& visit)
      : space_(space), state_(state), shard_(shard), visit_(visit) {}

  void run() {
    for (const auto& group : space_.slot_groups()) {
      group_ = &group;
      slots_ = group.list;
      if (std::ranges::any_of(slots_, [&](int slot) { return space_.is_final(state_, slot); })) {
        continue;
      }
      if (std::ranges::all_of(slots_, [&](int slot) { return state_.is_partial(slot); })) {
        reduce();
      } else if (slots_.size() == 1 && state_.is_replicate(slots_.front())) {
        leave_replicated(slots_.front());
      } else if (const int dim = last_cuts_of(); dim >= 0) {
        gather_or_move(dim);
      }
      if (space_.has_one_target()) {
        exchange();
      } else if (slots_.size() == 1) {
        change_split_factor(slots_.front());
      }
    }
  }

  void run_exchanges() {
    for (const auto& group : space_.slot_groups()) {
      group_ = &group;
      slots_ = group.list;
      std::array<uint8_t, kMaxDims> num{};
      const bool sharded_or_replicated =
          std::ranges::none_of(slots_, [&](int slot) { return state_.is_partial(slot); });
      if (slots_.size() > 1 && slots_.size() <= kMaxSlotsPermuted && sharded_or_replicated &&
          others_cut_first(num)) {
        State next = state_;
        set_all(next, State::kReplicate);
        exchange_from(0, next, num);
      }
    }
  }

 private:
  // Returns the dim whose last cuts are made by exactly slots_, or -1 if there is none.
  int last_cuts_of() const {
    if (!state_.is_shard(slots_.front())) {
      return -1;
    }
    const uint8_t dim = state_.place.at(slots_.front());
    const size_t num = shard_.num_cuts.at(dim);
    for (const int slot : slots_) {
      if (state_.place.at(slot) != dim || state_.position.at(slot) + slots_.size() < num) {
        return -1;
      }
    }
    return dim;
  }

  void reduce() {
    State next = state_;
    set_all(next, State::kReplicate);
    add(StepKind::kAllReduce, next);
    cut_every_dim(StepKind::kReduceScatter, -1);
  }

  void leave_replicated(int slot) {
    cut_every_dim(StepKind::kSplit, -1);
    to_partial(StepKind::kToPartial, slot);
  }

  void gather_or_move(int dim) {
    State next = state_;
    set_all(next, State::kReplicate);
    add(StepKind::kAllGather, next);
    cut_every_dim(StepKind::kAllToAll, dim);
    if (slots_.size() == 1) {
      to_partial(StepKind::kEmbed, slots_.front());
    }
  }

  void to_partial(StepKind kind, int slot) {
    State next = state_;
    for (const uint8_t place : space_.targets(slot).partials) {
      set_all(next, place);
      // An average has no neutral element that could surround the shard.
      const bool is_legal = kind != StepKind::kEmbed || next.op(slot) != PartialOp::kAvg;
      if (is_legal && commutes_with_all(next.op(slot))) {
        add(kind, next);
      }
    }
  }

  bool commutes_with_all(PartialOp op) const {
    for (int slot = 0; slot < space_.num_slots(); ++slot) {
      if (state_.is_partial(slot) && !commute(state_.op(slot), op)) {
        return false;
      }
    }
    return true;
  }

  // Visits the states in which slots_ cut a dim other than `except`, after its present cuts, in every order.
  void cut_every_dim(StepKind kind, int64_t except) {
    for (const int64_t dim : space_.dims_) {
      if (dim != except) {
        for_each_order(dim, [&](const Slots& order) { cut(kind, dim, order, 0); });
      }
    }
    if (slots_.size() == 1) {
      for (const auto& strided : space_.targets(slots_.front()).strided) {
        if (strided.dim != except) {
          cut(kind, strided.dim, slots_, strided.split);
        }
      }
    }
  }

  void cut(StepKind kind, int64_t dim, const Slots& order, uint8_t split) {
    State next = state_;
    uint8_t position = shard_.num_cuts.at(dim);
    for (const int slot : order) {
      next.place.at(slot) = static_cast<uint8_t>(dim);
      next.split.at(slot) = split;
      next.position.at(slot) = position++;
    }
    add(kind, next);
  }

  // Visits the states in which the last cut of a dim gets the final split factor of a target.
  void change_split_factor(int slot) {
    const bool is_last =
        state_.is_shard(slot) && state_.position.at(slot) + 1 == shard_.num_cuts.at(state_.place.at(slot));
    if (!is_last) {
      return;
    }
    const uint8_t dim = state_.place.at(slot);
    const uint8_t now = state_.split.at(slot);
    State next = state_;
    const auto cut_by = [&](uint8_t split) {
      if (space_.split_factors_[split] != space_.split_factors_[now]) {
        next.split.at(slot) = split;
        add(space_.kind_of_exchange(group_->slots, state_, shard_, next), next);
      }
    };
    if (space_.final_plain_ != 0) {
      cut_by(space_.final_plain_);
    }
    for (const auto& strided : space_.targets(slot).strided) {
      if (strided.dim == dim) {
        cut_by(strided.split);
      }
    }
  }

  template <typename F>
  void for_each_order(int64_t dim, F&& use) {
    Slots order = slots_;
    use(order);
    if (order.size() == 1) {
      return;
    }
    if (order.size() <= kMaxSlotsPermuted) {
      while (std::ranges::next_permutation(order).found) {
        use(order);
      }
      return;
    }
    const State& dst = space_.dst_;
    if (space_.has_one_target() &&
        std::all_of(order.begin(), order.end(), [&](int slot) { return dst.place.at(slot) == dim; })) {
      std::sort(order.begin(), order.end(),
                [&](int a, int b) { return dst.position.at(a) < dst.position.at(b); });
      if (order != slots_) {
        use(order);
      }
    }
  }

  // Visits the exchange by which slots_ take their placements in dst. No other axis may cut a dim after them.
  void exchange() {
    const State& dst = space_.dst_;
    bool changes = false;
    bool all_sharded = true;
    for (const int slot : slots_) {
      if (state_.is_partial(slot) || dst.is_partial(slot)) {
        return;
      }
      changes |= state_.place.at(slot) != dst.place.at(slot) || state_.split.at(slot) != dst.split.at(slot);
      changes |= slots_.size() > 1 && state_.position.at(slot) != dst.position.at(slot);
      all_sharded &= state_.is_shard(slot) && dst.is_shard(slot);
    }
    // On one axis only a change of the split factor is an exchange; other changes have steps of their own.
    if (!changes || (slots_.size() == 1 &&
                     (!all_sharded || state_.place.at(slots_.front()) != dst.place.at(slots_.front())))) {
      return;
    }
    State next = state_;
    std::array<uint8_t, kMaxDims> num{};
    if (!others_cut_first(num)) {
      return;
    }
    set_all(next, State::kReplicate);
    Slots order = slots_;
    std::ranges::sort(order, [&](int a, int b) { return dst.position.at(a) < dst.position.at(b); });
    for (const int slot : order) {
      if (dst.is_shard(slot)) {
        next.place.at(slot) = dst.place.at(slot);
        next.split.at(slot) = dst.split.at(slot);
        next.position.at(slot) = num.at(dst.place.at(slot))++;
      }
    }
    finish_exchange(next);
  }

  // Visits the exchanges in which the slots from the `i`-th on take any placements of targets, in every order
  // of their cuts. `num` counts the cuts of each dim.
  void exchange_from(size_t i, const State& next, std::array<uint8_t, kMaxDims>& num) {
    if (i == slots_.size()) {
      finish_exchange(next);
      return;
    }
    exchange_from(i + 1, next, num);
    const int slot = slots_.begin()[i];
    for (const int64_t dim : space_.dims_) {
      shard_from(i, next, num, {static_cast<uint8_t>(dim), 0});
    }
    for (const auto& strided : space_.targets(slot).strided) {
      shard_from(i, next, num, strided);
    }
  }

  void shard_from(size_t i, const State& before, std::array<uint8_t, kMaxDims>& num,
                  const Space::Strided& cut) {
    const int slot = slots_.begin()[i];
    State next = before;
    next.place.at(slot) = cut.dim;
    next.split.at(slot) = cut.split;
    next.position.at(slot) = num.at(cut.dim)++;
    exchange_from(i + 1, next, num);
    // The new cut then moves forward past the earlier cuts by slots_, one at a time.
    for (size_t j = 0; j < i; ++j) {
      for (const int other : slots_) {
        if (other != slot && next.place.at(other) == cut.dim &&
            next.position.at(other) + 1 == next.position.at(slot)) {
          std::swap(next.position.at(other), next.position.at(slot));
          exchange_from(i + 1, next, num);
          break;
        }
      }
    }
    --num.at(cut.dim);
  }

  void finish_exchange(const State& next) {
    if (next == state_) {
      return;
    }
    const bool all_sharded =
        std::ranges::all_of(slots_, [&](int slot) { return state_.is_shard(slot) && next.is_shard(slot); });
    const StepKind kind = space_.kind_of_exchange(group_->slots, state_, shard_, next);
    if (all_sharded || kind == StepKind::kPermute) {
      add(kind, next);
    }
  }

  // Returns true if no slot outside slots_ cuts a dim after one of slots_. Counts other slots' cuts in `num`.
  bool others_cut_first(std::array<uint8_t, kMaxDims>& num) const {
    for (int64_t dim = 0; dim < kMaxDims; ++dim) {
      bool seen = false;
      for (int i = 0; i < shard_.num_cuts.at(dim); ++i) {
        const bool ours = contains(group_->slots, shard_.cuts.at(dim).at(i));
        if (!ours && seen) {
          return false;
        }
        seen |= ours;
        num.at(dim) += ours ? 0 : 1;
      }
    }
    return true;
  }

  void set_all(State& next, uint8_t place) const {
    for (const int slot : slots_) {
      next.place.at(slot) = place;
      next.split.at(slot) = 0;
      next.position.at(slot) = 0;
    }
  }

  void add(StepKind kind, const State& next) const { visit_(kind, *group_, next); }

  const Space& space_;
  const State& state_;
  const LargestShard& shard_;
  const Space::Visit& visit_;
  const Space::SlotGroup* group_ = nullptr;
  Slots slots_;
};

void Space::expand(const State& state, const LargestShard& shard, const Visit& visit) const {
  Expansion(*this, state, shard, visit).run();
}

void Space::expand_exchanges(const Visit& visit) const {
  const LargestShard before = largest_shard(src_);
  Expansion(*this, src_, before, visit).run_exchanges();
}

}  // namespace funcol
