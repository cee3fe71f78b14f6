#include "planner/state.h"

#include <algorithm>
#include <stdexcept>

#include "layout/shards.h"

namespace funcol {
namespace {

// Beyond so many axes at once only the order of the mesh and that of dst are tried for the cuts they make
// together.
constexpr int kMaxSlotsPermuted = 3;

bool has(uint32_t slots, int slot) { return (slots >> slot & 1) != 0; }

int64_t elements_before(const std::array<int64_t, kMaxDims>& sizes, int64_t dim) {
  int64_t product = 1;
  for (int64_t i = 0; i < dim; ++i) {
    product *= sizes.at(i);
  }
  return product;
}

}  // namespace

// The steps from one state.
class Expansion {
 public:
  Expansion(const Space& space, const State& state, std::vector<Move>& moves)
      : space_(space), state_(state), held_(space.held(state)), moves_(moves) {}

  void run() {
    for (const auto& unit : space_.units()) {
      unit_ = &unit;
      slots_.clear();
      for (int slot = 0; slot < space_.num_slots(); ++slot) {
        if (has(unit.slots, slot)) {
          slots_.push_back(slot);
        }
      }
      if (std::ranges::all_of(slots_, [&](int slot) { return state_.is_partial(slot); })) {
        reduce();
      } else if (slots_.size() == 1 && state_.is_replicate(slots_.front())) {
        leave_replicated(slots_.front());
      } else if (const int dim = last_cuts_of(); dim >= 0) {
        gather_or_move(dim);
      }
      exchange();
    }
  }

 private:
  // The dim whose last cuts are those of slots_, or -1.
  int last_cuts_of() const {
    if (!state_.is_shard(slots_.front())) {
      return -1;
    }
    const uint8_t dim = state_.place.at(slots_.front());
    const size_t num = held_.num_cuts.at(dim);
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
    if (slots_.size() == 1 && space_.dst_.place.at(slots_.front()) != State::of(PartialOp::kAvg)) {
      to_partial(StepKind::kEmbed, slots_.front());
    }
  }

  void to_partial(StepKind kind, int slot) {
    if (!space_.dst_.is_partial(slot)) {
      return;
    }
    for (int other = 0; other < space_.num_slots(); ++other) {
      if (state_.is_partial(other) && !commute(state_.op(other), space_.dst_.op(slot))) {
        return;
      }
    }
    State next = state_;
    set_all(next, space_.dst_.place.at(slot));
    add(kind, next);
  }

  // Lets slots_ cut each dim but `except` behind the cuts that it has, in every order of theirs.
  void cut_every_dim(StepKind kind, int64_t except) {
    for (const int64_t dim : space_.dims_) {
      if (dim != except) {
        for_each_order(dim, [&](const std::vector<int>& order) { cut(kind, dim, order, 0); });
      }
    }
    const int slot = slots_.front();
    const State& dst = space_.dst_;
    if (slots_.size() == 1 && dst.is_shard(slot) && dst.split.at(slot) != 0 && dst.place.at(slot) != except) {
      cut(kind, dst.place.at(slot), slots_, dst.split.at(slot));
    }
  }

  void cut(StepKind kind, int64_t dim, const std::vector<int>& order, uint8_t split) {
    State next = state_;
    uint8_t position = held_.num_cuts.at(dim);
    for (const int slot : order) {
      next.place.at(slot) = static_cast<uint8_t>(dim);
      next.split.at(slot) = split;
      next.position.at(slot) = position++;
    }
    add(kind, next);
  }

  template <typename F>
  void for_each_order(int64_t dim, F&& use) {
    std::vector<int> order = slots_;
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
    if (std::all_of(order.begin(), order.end(), [&](int slot) { return dst.place.at(slot) == dim; })) {
      std::sort(order.begin(), order.end(),
                [&](int a, int b) { return dst.position.at(a) < dst.position.at(b); });
      if (order != slots_) {
        use(order);
      }
    }
  }

  // slots_ take their placements in dst, where no other axis cuts behind them.
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
    // One axis alone: all but a change of its split factor is a step of another kind.
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
    std::vector<int> order = slots_;
    std::ranges::sort(order, [&](int a, int b) { return dst.position.at(a) < dst.position.at(b); });
    for (const int slot : order) {
      if (dst.is_shard(slot)) {
        next.place.at(slot) = dst.place.at(slot);
        next.split.at(slot) = dst.split.at(slot);
        next.position.at(slot) = num.at(dst.place.at(slot))++;
      }
    }
    const StepKind kind = space_.kind_of_exchange(unit_->slots, state_, held_, next);
    if (next != state_ && (all_sharded || kind == StepKind::kPermute)) {
      add(kind, next);
    }
  }

  // True if no slot outside slots_ cuts a dim behind one of slots_; counts those of each dim.
  bool others_cut_first(std::array<uint8_t, kMaxDims>& num) const {
    for (int64_t dim = 0; dim < kMaxDims; ++dim) {
      bool seen = false;
      for (int i = 0; i < held_.num_cuts.at(dim); ++i) {
        const bool ours = has(unit_->slots, held_.cuts.at(dim).at(i));
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

  void add(StepKind kind, const State& next) {
    moves_.push_back(space_.move(kind, *unit_, state_, held_, next));
  }

  const Space& space_;
  const State& state_;
  const Held held_;
  std::vector<Move>& moves_;
  const Space::Unit* unit_ = nullptr;
  std::vector<int> slots_;
};

Space::Space(const Redistribution& task) : task_(task) {
  const auto& mesh = task.mesh;
  const auto too_many = [](int64_t got, const char* what, int most) {
    throw std::invalid_argument("plan_redistribution: " + std::to_string(got) + " " + what + "; at most " +
                                std::to_string(most) + " are planned for.");
  };
  if (task.shape.size() > kMaxDims) {
    too_many(static_cast<int64_t>(task.shape.size()), "dims", kMaxDims);
  }
  AxisSet several = 0;
  int64_t num_ranks = 1;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.sizes[axis] != 1) {
      if (num_slots_ == kMaxSlots) {
        too_many(kMaxSlots + 1, "mesh axes of several ranks", kMaxSlots);
      }
      axis_.at(num_slots_) = axis;
      ranks_.at(num_slots_) = mesh.sizes[axis];
      units_.push_back({uint32_t{1} << num_slots_, axis_set(axis)});
      ++num_slots_;
      several |= axis_set(axis);
      num_ranks *= mesh.sizes[axis];
    }
  }
  for (const AxisSet axes : mesh.merged) {
    Unit unit{0, axes};
    for (int slot = 0; slot < num_slots_; ++slot) {
      unit.slots |= contains(axes, axis_.at(slot)) ? uint32_t{1} << slot : 0;
    }
    const bool known =
        std::ranges::any_of(units_, [&](const Unit& other) { return other.slots == unit.slots; });
    if (unit.slots != 0 && !known) {
      units_.push_back(unit);
    }
  }
  learn_split_factors(task.src);
  learn_split_factors(task.dst);
  src_ = state(task.src);
  dst_ = state(task.dst);

  // Dims that neither layout cuts differ only in their size and place: where enough of them divide evenly,
  // the first ones stand for the rest.
  int num_free = 0;
  for (int64_t dim = 0; dim < static_cast<int64_t>(task.shape.size()); ++dim) {
    const bool used = !task.src.axes_of(dim).empty() || !task.dst.axes_of(dim).empty();
    const bool even = task.shape[dim] > 0 && task.shape[dim] % num_ranks == 0;
    if (used || num_free < num_slots_) {
      dims_.push_back(dim);
    }
    num_free += !used && even ? 1 : 0;
  }
}

void Space::learn_split_factors(const Layout& layout) {
  for (const auto& placement : layout.placements) {
    const auto& known = split_factors_;
    if (placement.is_shard() && std::ranges::find(known, placement.split_factor) == known.end()) {
      split_factors_.push_back(placement.split_factor);
    }
  }
}

State Space::state(const Layout& layout) const {
  State state;
  for (int slot = 0; slot < num_slots_; ++slot) {
    const auto& placement = layout.placements[axis_.at(slot)];
    if (placement.is_shard()) {
      state.place.at(slot) = static_cast<uint8_t>(placement.dim);
      const auto known = std::ranges::find(split_factors_, placement.split_factor);
      state.split.at(slot) = static_cast<uint8_t>(known - split_factors_.begin());
      for (const int64_t axis : layout.axes_of(placement.dim)) {
        if (axis == axis_.at(slot)) {
          break;
        }
        state.position.at(slot) += task_.mesh.sizes[axis] != 1 ? 1 : 0;
      }
    } else {
      state.place.at(slot) = placement.is_partial() ? State::of(placement.op) : State::kReplicate;
    }
  }
  return state;
}

Layout Space::layout(const State& state) const {
  if (state == dst_) {
    return task_.dst;
  }
  Layout layout;
  layout.placements = task_.dst.placements;
  for (int slot = 0; slot < num_slots_; ++slot) {
    auto& placement = layout.placements[axis_.at(slot)];
    placement = state.is_shard(slot)
                    ? Placement::shard(state.place.at(slot), split_factors_[state.split.at(slot)])
                : state.is_partial(slot) ? Placement::partial(state.op(slot))
                                         : Placement::replicate();
  }
  const Held all = held(state);
  for (size_t dim = 0; dim < task_.shape.size(); ++dim) {
    std::vector<int64_t> axes;
    axes.reserve(task_.mesh.sizes.size());
    for (int i = 0; i < all.num_cuts.at(dim); ++i) {
      axes.push_back(axis_.at(all.cuts.at(dim).at(i)));
    }
    for (const int64_t axis : task_.dst.axes_of(static_cast<int64_t>(dim))) {
      if (task_.mesh.sizes[axis] == 1) {
        axes.push_back(axis);
      }
    }
    if (!axes.empty()) {
      layout.order.resize(dim + 1);
      layout.order[dim] = std::move(axes);
    }
  }
  return layout;
}

Held Space::held(const State& state) const {
  Held held;
  for (int slot = 0; slot < num_slots_; ++slot) {
    if (state.is_shard(slot)) {
      const uint8_t dim = state.place.at(slot);
      held.cuts.at(dim).at(state.position.at(slot)) = static_cast<uint8_t>(slot);
      ++held.num_cuts.at(dim);
    }
  }
  held.bytes = task_.itemsize;
  for (size_t dim = 0; dim < task_.shape.size(); ++dim) {
    int64_t size = task_.shape[dim];
    for (int i = 0; i < held.num_cuts.at(dim); ++i) {
      const int slot = held.cuts.at(dim).at(i);
      size = longest_shard(size, ranks_.at(slot), split_factors_[state.split.at(slot)]);
    }
    held.sizes.at(dim) = size;
    held.bytes *= size;
  }
  return held;
}

int64_t Space::num_ranks(uint32_t slots) const {
  int64_t product = 1;
  for (int slot = 0; slot < num_slots_; ++slot) {
    product *= has(slots, slot) ? ranks_.at(slot) : 1;
  }
  return product;
}

int64_t Space::least_bytes() const {
  int64_t numel = 1;
  for (const int64_t size : task_.shape) {
    numel *= size;
  }
  const int64_t num_ranks_here = num_ranks(~uint32_t{0});
  return (numel + num_ranks_here - 1) / num_ranks_here * task_.itemsize;
}

bool Space::is_inner(int64_t dim) const {
  int64_t before = 1;
  for (int64_t i = 0; i < dim && i < static_cast<int64_t>(task_.shape.size()); ++i) {
    before *= task_.shape[i];
  }
  return before > num_ranks(~uint32_t{0});
}

void Space::expand(const State& state, std::vector<Move>& moves) const {
  Expansion(*this, state, moves).run();
}

// The last cuts of `dim` are those of `slots`, in the order of the mesh, plain, and leave equal shards.
bool Space::cuts_evenly(const State& state, const Held& held, int64_t dim, uint32_t slots) const {
  int64_t size = task_.shape[dim];
  int last = -1;
  for (int i = 0; i < held.num_cuts.at(dim); ++i) {
    const int slot = held.cuts.at(dim).at(i);
    if (!has(slots, slot)) {
      size = longest_shard(size, ranks_.at(slot), split_factors_[state.split.at(slot)]);
      continue;
    }
    if (state.split.at(slot) != 0 || slot < last || size % ranks_.at(slot) != 0) {
      return false;
    }
    size /= ranks_.at(slot);
    last = slot;
  }
  return true;
}

Move Space::move(StepKind kind, const Unit& unit, const State& before, const Held& held_before,
                 const State& after) const {
  Move move{after, held(after), {}};
  move.size = step_size(kind, unit, before, held_before, after, move.held);
  return move;
}

StepSize Space::step_size(StepKind kind, const Unit& unit, const State& before, const Held& held_before,
                          const State& after, const Held& held_after) const {
  StepSize size{kind, unit.axes, held_before.bytes, held_after.bytes, 0, 0};
  const uint32_t slots = unit.slots;
  const int first = std::countr_zero(slots);
  int64_t num_ranks = 1;
  bool one_from = true;
  bool one_to = true;
  for (int slot = first; slot < num_slots_; ++slot) {
    if (has(slots, slot)) {
      num_ranks *= ranks_.at(slot);
      one_from &= before.place.at(slot) == before.place.at(first);
      one_to &= after.place.at(slot) == after.place.at(first);
    }
  }
  const int64_t from = before.place.at(first);
  const int64_t to = after.place.at(first);
  switch (kind) {
    case StepKind::kAllGather:
      size.bytes_whole = std::max(size.bytes_after, num_ranks * size.bytes_before);
      if (!cuts_evenly(before, held_before, from, slots) || elements_before(held_before.sizes, from) != 1) {
        size.bytes_copied = size.bytes_after;
      }
      break;
    case StepKind::kReduceScatter:
      size.bytes_whole = std::max(size.bytes_before, num_ranks * size.bytes_after);
      if (!cuts_evenly(after, held_after, to, slots) || elements_before(held_after.sizes, to) != 1) {
        size.bytes_copied = size.bytes_before;
      }
      break;
    case StepKind::kAllReduce:
      size.bytes_whole = size.bytes_before;
      break;
    case StepKind::kPermute:
      size.bytes_whole = std::max(size.bytes_before, size.bytes_after);
      break;
    case StepKind::kAllToAll: {
      size.bytes_whole = std::max(size.bytes_before, size.bytes_after);
      const bool even = one_from && one_to && from != to && cuts_evenly(before, held_before, from, slots) &&
                        cuts_evenly(after, held_after, to, slots);
      size.bytes_copied = (even && elements_before(held_before.sizes, to) == 1 ? 0 : size.bytes_before) +
                          (even && elements_before(held_after.sizes, from) == 1 ? 0 : size.bytes_after);
      break;
    }
    case StepKind::kSplit:
    case StepKind::kToPartial:
    case StepKind::kEmbed:
    case StepKind::kApplyMask:
    case StepKind::kMask:
      size.bytes_copied = size.bytes_after;
      break;
  }
  return size;
}

StepKind Space::kind_of_exchange(uint32_t slots, const State& before, const Held& held_before,
                                 const State& after) const {
  const Held held_after = held(after);
  for (size_t dim = 0; dim < task_.shape.size(); ++dim) {
    // Cuts of `slots`, and of all slots; both layouts have to make blocks of one size.
    const auto blocks = [&](const State& state, const Held& held) {
      std::pair<int64_t, int64_t> product{1, 1};
      bool plain = true;
      for (int i = 0; i < held.num_cuts.at(dim); ++i) {
        const int slot = held.cuts.at(dim).at(i);
        product.first *= has(slots, slot) ? ranks_.at(slot) : 1;
        product.second *= ranks_.at(slot);
        plain &= state.split.at(slot) == 0;
      }
      return std::pair{product, plain && task_.shape[dim] % product.second == 0};
    };
    const auto [product_before, even_before] = blocks(before, held_before);
    const auto [product_after, even_after] = blocks(after, held_after);
    const bool untouched = product_before.first == 1 && product_after.first == 1;
    if (!untouched && (product_before != product_after || !even_before || !even_after)) {
      return StepKind::kAllToAll;
    }
  }
  return StepKind::kPermute;
}

}  // namespace funcol
