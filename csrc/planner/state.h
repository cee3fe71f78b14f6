// States of the planner's search: layouts in a compact form, and the space of steps between them.
//
// Mesh axes of one rank are left out. A "slot" is the index of an axis among the remaining ones.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <vector>

#include "layout/layout.h"
#include "planner/cost_model.h"
#include "planner/search.h"

namespace funcol {

constexpr int kMaxSlots = 8;
constexpr int kMaxDims = 16;

struct State {
  // Values of `place`: a smaller number is the sharded dim, a PartialOp is added to the last two.
  static constexpr uint8_t kReplicate = kMaxDims;
  static constexpr uint8_t kPartial = kMaxDims + 1;
  static constexpr uint8_t kNumOps = 8;
  static constexpr uint8_t kFinalPartial = kPartial + kNumOps;  // see Space::is_final

  std::array<uint8_t, kMaxSlots> place{};
  std::array<uint8_t, kMaxSlots> split{};     // index into Space::split_factors_
  std::array<uint8_t, kMaxSlots> position{};  // of this cut among the cuts of its dim

  static constexpr uint8_t of(PartialOp op) { return kPartial + static_cast<uint8_t>(op); }
  static constexpr uint8_t final(PartialOp op) { return kFinalPartial + static_cast<uint8_t>(op); }

  bool is_shard(int slot) const { return place.at(slot) < kMaxDims; }
  bool is_replicate(int slot) const { return place.at(slot) == kReplicate; }
  bool is_partial(int slot) const { return place.at(slot) >= kPartial; }
  PartialOp op(int slot) const { return static_cast<PartialOp>((place.at(slot) - kPartial) % kNumOps); }

  // Returns the bytes of the three lists, which are hashed and compared as words.
  std::array<uint64_t, 3> words() const { return std::bit_cast<std::array<uint64_t, 3>>(*this); }

  friend bool operator==(const State& a, const State& b) {
    const auto x = a.words();
    const auto y = b.words();
    return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
  }
};

struct StateHash {
  size_t operator()(const State& state) const {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const uint64_t word : state.words()) {
      hash = (hash ^ word) * 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// The shard that the first rank, which holds most, has in a state.
struct LargestShard {
  // The slots that cut each dim, in the order of their cuts.
  std::array<std::array<uint8_t, kMaxSlots>, kMaxDims> cuts{};
  std::array<uint8_t, kMaxDims> num_cuts{};
  std::array<int64_t, kMaxDims> sizes{};  // of the local tensor
  int64_t bytes = 0;
};

// A step that leads to the state `next`.
struct Move {
  State next;
  LargestShard shard;  // in the state `next`
  StepSize size;
};

// A list of slots, ascending until the caller permutes it.
class Slots {
 public:
  void add(int slot) { slots_.at(num_++) = static_cast<uint8_t>(slot); }

  size_t size() const { return num_; }
  int front() const { return slots_.front(); }
  uint8_t* begin() { return slots_.data(); }
  uint8_t* end() { return slots_.data() + num_; }
  const uint8_t* begin() const { return slots_.data(); }
  const uint8_t* end() const { return slots_.data() + num_; }

  friend bool operator==(const Slots&, const Slots&) = default;

 private:
  std::array<uint8_t, kMaxSlots> slots_{};
  uint8_t num_ = 0;
};

// The states of one tensor and the steps between them, for one target layout or for many.
//
// Steps make partials and strided shards only where a target has them. With many targets these placements are
// final: an axis keeps them, so that a path has no steps that only another target needs.
class Space {
 public:
  // Slots whose ranks have a process group.
  struct SlotGroup {
    uint32_t slots;
    AxisSet axes;  // `slots` as mesh axes
    Slots list;    // `slots` as a list
  };
  using Visit = std::function<void(StepKind, const SlotGroup&, const State& next)>;

  // Makes a space with one target. Both constructors throw std::invalid_argument for more axes or dims than a
  // State holds. All arguments must outlive the space.
  explicit Space(const Redistribution& task);
  // Makes a space with many targets: all layouts of Replicate, the placements of `source` and those of
  // `vocabulary`. Masks are ignored.
  Space(const Mesh& mesh, const std::vector<int64_t>& shape, int64_t itemsize, const Layout& source,
        const std::vector<Placement>& vocabulary);

  const State& src() const { return src_; }
  // Returns the target, in a space with one target.
  const State& dst() const { return dst_; }
  int num_slots() const { return num_slots_; }
  const std::vector<SlotGroup>& slot_groups() const { return slot_groups_; }
  // Returns true if src or a target has a strided shard.
  bool has_strided_shards() const { return split_factors_.size() > 1; }
  // Returns the slot of a mesh axis, or -1 for an axis of one rank.
  int slot(int64_t axis) const;
  int64_t axis(int slot) const { return axis_.at(slot); }

  LargestShard largest_shard(const State& state) const;

  int64_t num_ranks(uint32_t slots) const;
  // Returns the fewest bytes that the first rank can hold: its share if every axis cuts the tensor.
  int64_t least_bytes() const;
  // Returns true if the first rank holds several elements before `dim` in memory order, whichever axes cut
  // the dims in front of it.
  bool is_inner(int64_t dim) const;

  // Visits every step from `state`. Several steps may lead to one state.
  void expand(const State& state, const LargestShard& shard, const Visit& visit) const;
  // Visits every exchange over two or three merged axes from src, which must be the last step of its path.
  // Requires a space with many targets.
  void expand_exchanges(const Visit& visit) const;

  // Returns true if the slot holds a final placement, which was made for a target.
  bool is_final(const State& state, int slot) const {
    return state.place.at(slot) >= State::kFinalPartial || state.split.at(slot) >= first_final_split_;
  }
  // Returns `state` with final placements written as state() writes them.
  State without_final(State state) const;

  // Returns the state of a layout, whose split factors must occur in src or a target.
  State state(const Layout& layout) const;
  // Returns the State::split of a split factor, or -1 if neither src nor a target has it.
  int split(int64_t factor) const;
  // Returns the layout of a state in a space with one target. Axes of one rank get their placements in dst.
  Layout layout(const State& state) const;

  // Returns the step of this kind over `group` from `before` to `after`.
  Move move(StepKind kind, const SlotGroup& group, const State& before, const LargestShard& shard,
            const State& after) const;

  // Returns the kind of an exchange between shards of `slots`: permute if every rank sends its entire tensor
  // to one rank, else all_to_all.
  StepKind kind_of_exchange(uint32_t slots, const State& before, const LargestShard& shard,
                            const State& after) const;

 private:
  friend class Expansion;

  struct Strided {
    uint8_t dim;
    uint8_t split;
  };
  // The placements of targets, besides Replicate and plain shards, that steps may make on a slot.
  struct TargetPlacements {
    std::vector<uint8_t> partials;  // as State::place
    std::vector<Strided> strided;
  };

  Space(const Mesh& mesh, const std::vector<int64_t>& shape, int64_t itemsize);
  void add_slot_groups();
  bool has_one_target() const { return dst_layout_ != nullptr; }
  const TargetPlacements& targets(int slot) const { return targets_[has_one_target() ? slot : 0]; }
  void add_split_factors(const Layout& layout);
  void add_vocabulary(const std::vector<Placement>& vocabulary);
  void choose_dims(uint32_t used);
  bool cuts_evenly(const State& state, const LargestShard& shard, int64_t dim, uint32_t slots) const;
  StepSize step_size(StepKind kind, const SlotGroup& group, const State& before,
                     const LargestShard& shard_before, const State& after,
                     const LargestShard& shard_after) const;

  const Mesh& mesh_;
  const std::vector<int64_t>& shape_;
  const int64_t itemsize_;
  const Layout* dst_layout_ = nullptr;
  int num_slots_ = 0;
  std::array<int64_t, kMaxSlots> axis_{};  // slot -> mesh axis
  std::array<int64_t, kMaxSlots> ranks_{};
  std::vector<int64_t> split_factors_{1};
  uint8_t first_final_split_ = UINT8_MAX;  // split factors from this index on are final
  uint8_t final_plain_ = 0;  // the final index of split factor 1; 0 if src has no strided shards
  std::vector<SlotGroup> slot_groups_;
  std::vector<int64_t> dims_;              // the dims that steps may shard
  std::vector<TargetPlacements> targets_;  // by slot; with many targets one entry for all slots
  State src_;
  State dst_;
};

}  // namespace funcol
