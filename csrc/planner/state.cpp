#include "planner/state.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>

#include "layout/shards.h"
#include "layout/tensor_meta.h"

namespace funcol {
namespace {

template <typename Sizes>
int64_t elements_before(const Sizes& sizes, int64_t dim) {
  return std::accumulate(sizes.begin(), sizes.begin() + dim, int64_t{1}, std::multiplies<>());
}

uint32_t sharded_dims(const std::vector<Placement>& placements) {
  uint32_t dims = 0;
  for (const auto& placement : placements) {
    dims |= placement.is_shard() ? uint32_t{1} << placement.dim : 0;
  }
  return dims;
}

}  // namespace

Space::Space(const Mesh& mesh, const std::vector<int64_t>& shape, int64_t itemsize)
    : mesh_(mesh), shape_(shape), itemsize_(itemsize) {
  const auto too_many = [](int64_t got, const char* what, int most) {
    throw std::invalid_argument("plan_redistribution: " + std::to_string(got) + " " + what + "; at most " +
                                std::to_string(most) + " are planned for.");
  };
  if (shape.size() > kMaxDims) {
    too_many(static_cast<int64_t>(shape.size()), "dims", kMaxDims);
  }
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.sizes[axis] != 1) {
      if (num_slots_ == kMaxSlots) {
        too_many(kMaxSlots + 1, "mesh axes of several ranks", kMaxSlots);
      }
      axis_.at(num_slots_) = axis;
      ranks_.at(num_slots_) = mesh.sizes[axis];
      ++num_slots_;
    }
  }
  add_slot_groups();
}

Space::Space(const Redistribution& task) : Space(task.mesh, task.shape, task.itemsize) {
  dst_layout_ = &task.dst;
  add_split_factors(task.src);
  add_split_factors(task.dst);
  src_ = state(task.src);
  dst_ = state(task.dst);
  targets_.resize(num_slots_);
  for (int slot = 0; slot < num_slots_; ++slot) {
    if (dst_.is_partial(slot)) {
      targets_[slot].partials.push_back(dst_.place.at(slot));
    } else if (dst_.is_shard(slot) && dst_.split.at(slot) != 0) {
      targets_[slot].strided.push_back({dst_.place.at(slot), dst_.split.at(slot)});
    }
  }
  choose_dims(sharded_dims(task.src.placements) | sharded_dims(task.dst.placements));
}

Space::Space(const Mesh& mesh, const std::vector<int64_t>& shape, int64_t itemsize, const Layout& source,
             const std::vector<Placement>& vocabulary)
    : Space(mesh, shape, itemsize) {
  add_split_factors(source);
  src_ = state(source);
  add_vocabulary(vocabulary);
  choose_dims(sharded_dims(source.placements) | sharded_dims(vocabulary));
}

void Space::add_slot_groups() {
  for (int slot = 0; slot < num_slots_; ++slot) {
    slot_groups_.push_back({axis_set(slot), axis_set(axis_.at(slot)), {}});
  }
  for (const AxisSet axes : mesh_.merged) {
    SlotGroup group{0, axes, {}};
    for (int slot = 0; slot < num_slots_; ++slot) {
      group.slots |= contains(axes, axis_.at(slot)) ? axis_set(slot) : 0;
    }
    const bool known =
        std::ranges::any_of(slot_groups_, [&](const SlotGroup& other) { return other.slots == group.slots; });
    if (group.slots != 0 && !known) {
      slot_groups_.push_back(group);
    }
  }
  for (auto& group : slot_groups_) {
    for (int slot = 0; slot < num_slots_; ++slot) {
      if (contains(group.slots, slot)) {
        group.list.add(slot);
      }
    }
  }
}

void Space::add_vocabulary(const std::vector<Placement>& vocabulary) {
  first_final_split_ = static_cast<uint8_t>(split_factors_.size());
  if (split_factors_.size() > 1) {
    final_plain_ = first_final_split_;
    split_factors_.push_back(1);
  }
  TargetPlacements targets;
  for (const auto& placement : vocabulary) {
    if (placement.is_partial() && placement.mask == 0) {
      targets.partials.push_back(State::final(placement.op));
    } else if (placement.is_shard() && placement.split_factor != 1) {
      const auto first = split_factors_.begin() + first_final_split_;
      const auto known = std::find(first, split_factors_.end(), placement.split_factor);
      targets.strided.push_back(
          {static_cast<uint8_t>(placement.dim), static_cast<uint8_t>(known - split_factors_.begin())});
      if (known == split_factors_.end()) {
        split_factors_.push_back(placement.split_factor);
      }
    }
  }
  targets_.push_back(std::move(targets));
}

// Fills dims_ with the dims that a path may need. Dims that neither src nor a target cuts are only stopovers,
// so a few are enough if they divide evenly: one for each slot.
void Space::choose_dims(uint32_t used) {
  int num_free = 0;
  const int64_t num_ranks_here = num_ranks(~AxisSet{0});
  for (int64_t dim = 0; dim < static_cast<int64_t>(shape_.size()); ++dim) {
    const bool is_used = (used >> dim & 1) != 0;
    const bool even = shape_[dim] > 0 && shape_[dim] % num_ranks_here == 0;
    if (is_used || num_free < num_slots_) {
      dims_.push_back(dim);
    }
    num_free += !is_used && even ? 1 : 0;
  }
}

void Space::add_split_factors(const Layout& layout) {
  for (const auto& placement : layout.placements) {
    const auto& known = split_factors_;
    if (placement.is_shard() && std::ranges::find(known, placement.split_factor) == known.end()) {
      split_factors_.push_back(placement.split_factor);
    }
  }
}

int Space::slot(int64_t axis) const {
  const auto* const end = axis_.begin() + num_slots_;
  const auto* const found = std::find(axis_.begin(), end, axis);
  return found == end ? -1 : static_cast<int>(found - axis_.begin());
}

int Space::split(int64_t factor) const {
  const auto found = std::ranges::find(split_factors_, factor);
  return found == split_factors_.end() ? -1 : static_cast<int>(found - split_factors_.begin());
}

State Space::without_final(State state) const {
  for (int slot = 0; slot < num_slots_; ++slot) {
    if (state.place.at(slot) >= State::kFinalPartial) {
      state.place.at(slot) -= State::kNumOps;
    } else if (state.split.at(slot) >= first_final_split_) {
      state.split.at(slot) = static_cast<uint8_t>(split(split_factors_[state.split.at(slot)]));
    }
  }
  return state;
}

State Space::state(const Layout& layout) const {
  State state;
  for (int slot = 0; slot < num_slots_; ++slot) {
    const auto& placement = layout.placements[axis_.at(slot)];
    if (placement.is_shard()) {
      state.place.at(slot) = static_cast<uint8_t>(placement.dim);
      state.split.at(slot) = static_cast<uint8_t>(split(placement.split_factor));
      for (const int64_t axis : layout.axes_of(placement.dim)) {
        if (axis == axis_.at(slot)) {
          break;
        }
        state.position.at(slot) += mesh_.sizes[axis] != 1 ? 1 : 0;
      }
    } else {
      if (placement.is_norm()) {
        throw std::invalid_argument(
            "plan_redistribution: " + to_string(placement) + " of mesh axis " + mesh_.name(axis_.at(slot)) +
            " is not a sum of what the ranks hold. Reduce it before by its own rule.");
      }
      state.place.at(slot) = placement.is_partial() ? State::of(placement.op) : State::kReplicate;
    }
  }
  return state;
}

Layout Space::layout(const State& state) const {
  if (state == dst_) {
    return *dst_layout_;
  }
  Layout layout;
  layout.placements = dst_layout_->placements;
  for (int slot = 0; slot < num_slots_; ++slot) {
    auto& placement = layout.placements[axis_.at(slot)];
    placement = state.is_shard(slot)
                    ? Placement::shard(state.place.at(slot), split_factors_[state.split.at(slot)])
                : state.is_partial(slot) ? Placement::partial(state.op(slot))
                                         : Placement::replicate();
  }
  const LargestShard all = largest_shard(state);
  for (size_t dim = 0; dim < shape_.size(); ++dim) {
    std::vector<int64_t> axes;
    axes.reserve(mesh_.sizes.size());
    for (int i = 0; i < all.num_cuts.at(dim); ++i) {
      axes.push_back(axis_.at(all.cuts.at(dim).at(i)));
    }
    for (const int64_t axis : dst_layout_->axes_of(static_cast<int64_t>(dim))) {
      if (mesh_.sizes[axis] == 1) {
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

LargestShard Space::largest_shard(const State& state) const {
  LargestShard shard;
  for (int slot = 0; slot < num_slots_; ++slot) {
    if (state.is_shard(slot)) {
      const uint8_t dim = state.place.at(slot);
      shard.cuts.at(dim).at(state.position.at(slot)) = static_cast<uint8_t>(slot);
      ++shard.num_cuts.at(dim);
    }
  }
  shard.bytes = itemsize_;
  for (size_t dim = 0; dim < shape_.size(); ++dim) {
    int64_t size = shape_[dim];
    for (int i = 0; i < shard.num_cuts.at(dim); ++i) {
      const int slot = shard.cuts.at(dim).at(i);
      size = longest_shard(size, ranks_.at(slot), split_factors_[state.split.at(slot)]);
    }
    shard.sizes.at(dim) = size;
    shard.bytes *= size;
  }
  return shard;
}

int64_t Space::num_ranks(uint32_t slots) const {
  int64_t product = 1;
  for (int slot = 0; slot < num_slots_; ++slot) {
    product *= contains(slots, slot) ? ranks_.at(slot) : 1;
  }
  return product;
}

int64_t Space::least_bytes() const {
  const int64_t num_ranks_here = num_ranks(~AxisSet{0});
  return (num_elements(shape_) + num_ranks_here - 1) / num_ranks_here * itemsize_;
}

bool Space::is_inner(int64_t dim) const {
  return elements_before(shape_, std::min(dim, std::ssize(shape_))) > num_ranks(~AxisSet{0});
}

// Returns true if `slots` make the last cuts of `dim`, in mesh order, without split factors, and into equal
// shards.
bool Space::cuts_evenly(const State& state, const LargestShard& shard, int64_t dim, uint32_t slots) const {
  int64_t size = shape_[dim];
  int last = -1;
  for (int i = 0; i < shard.num_cuts.at(dim); ++i) {
    const int slot = shard.cuts.at(dim).at(i);
    if (!contains(slots, slot)) {
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

Move Space::move(StepKind kind, const SlotGroup& group, const State& before, const LargestShard& shard_before,
                 const State& after) const {
  Move move{after, largest_shard(after), {}};
  move.size = step_size(kind, group, before, shard_before, after, move.shard);
  return move;
}

StepSize Space::step_size(StepKind kind, const SlotGroup& group, const State& before,
                          const LargestShard& shard_before, const State& after,
                          const LargestShard& shard_after) const {
  StepSize size{kind, group.axes, shard_before.bytes, shard_after.bytes, 0, 0};
  const uint32_t slots = group.slots;
  const int first = std::countr_zero(slots);
  int64_t num_ranks = 1;
  bool one_from = true;
  bool one_to = true;
  for (int slot = first; slot < num_slots_; ++slot) {
    if (contains(slots, slot)) {
      num_ranks *= ranks_.at(slot);
      one_from &= before.place.at(slot) == before.place.at(first);
      one_to &= after.place.at(slot) == after.place.at(first);
    }
  }
  const int64_t from = before.place.at(first);
  const int64_t to = after.place.at(first);
  switch (kind) {
    case StepKind::kAllGather:
      size.bytes_full = std::max(size.bytes_after, num_ranks * size.bytes_before);
      if (!cuts_evenly(before, shard_before, from, slots) || elements_before(shard_before.sizes, from) != 1) {
        size.bytes_copied = size.bytes_after;
      }
      break;
    case StepKind::kReduceScatter:
      size.bytes_full = std::max(size.bytes_before, num_ranks * size.bytes_after);
      if (!cuts_evenly(after, shard_after, to, slots) || elements_before(shard_after.sizes, to) != 1) {
        size.bytes_copied = size.bytes_before;
      }
      break;
    case StepKind::kAllReduce:
      size.bytes_full = size.bytes_before;
      break;
    case StepKind::kPermute:
      size.bytes_full = std::max(size.bytes_before, size.bytes_after);
      break;
    case StepKind::kAllToAll: {
      size.bytes_full = std::max(size.bytes_before, size.bytes_after);
      const bool even = one_from && one_to && from != to && cuts_evenly(before, shard_before, from, slots) &&
                        cuts_evenly(after, shard_after, to, slots);
      size.bytes_copied = (even && elements_before(shard_before.sizes, to) == 1 ? 0 : size.bytes_before) +
                          (even && elements_before(shard_after.sizes, from) == 1 ? 0 : size.bytes_after);
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

StepKind Space::kind_of_exchange(uint32_t slots, const State& before, const LargestShard& shard_before,
                                 const State& after) const {
  const LargestShard shard_after = largest_shard(after);
  for (size_t dim = 0; dim < shape_.size(); ++dim) {
    // {number of blocks cut by `slots`, number of blocks cut by all slots}, and whether all blocks are equal.
    const auto blocks = [&](const State& state, const LargestShard& shard) {
      std::pair<int64_t, int64_t> product{1, 1};
      bool plain = true;
      for (int i = 0; i < shard.num_cuts.at(dim); ++i) {
        const int slot = shard.cuts.at(dim).at(i);
        product.first *= contains(slots, slot) ? ranks_.at(slot) : 1;
        product.second *= ranks_.at(slot);
        plain &= state.split.at(slot) == 0;
      }
      return std::pair{product, plain && shape_[dim] % product.second == 0};
    };
    const auto [product_before, even_before] = blocks(before, shard_before);
    const auto [product_after, even_after] = blocks(after, shard_after);
    const bool untouched = product_before.first == 1 && product_after.first == 1;
    if (!untouched && (product_before != product_after || !even_before || !even_after)) {
      return StepKind::kAllToAll;
    }
  }
  return StepKind::kPermute;
}

}  // namespace funcol
