// The planner's view of a layout: small, flat, comparable; the steps that lead from one to the next.
//
// Axes that hold one rank are left out. An axis is known here by its place among the others ("slot").
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "layout/layout.h"
#include "planner/cost_model.h"
#include "planner/search.h"

namespace funcol {

constexpr int kMaxSlots = 8;
constexpr int kMaxDims = 16;

struct State {
  static constexpr uint8_t kReplicate = kMaxDims;    // below it: sharded on that dim
  static constexpr uint8_t kPartial = kMaxDims + 1;  // plus the PartialOp
  static constexpr uint8_t kNumOps = 8;
  static constexpr uint8_t kFinalPartial = kPartial + kNumOps;  // plus the PartialOp; see Space::is_final

  std::array<uint8_t, kMaxSlots> place{};
  std::array<uint8_t, kMaxSlots> split{};     // index into Space::split_factors
  std::array<uint8_t, kMaxSlots> position{};  // of this cut among those of its dim

  static constexpr uint8_t of(PartialOp op) { return kPartial + static_cast<uint8_t>(op); }
  static constexpr uint8_t final(PartialOp op) { return kFinalPartial + static_cast<uint8_t>(op); }

  bool is_shard(int slot) const { return place.at(slot) < kMaxDims; }
  bool is_replicate(int slot) const { return place.at(slot) == kReplicate; }
  bool is_partial(int slot) const { return place.at(slot) >= kPartial; }
  PartialOp op(int slot) const { return static_cast<PartialOp>((place.at(slot) - kPartial) % kNumOps); }

  friend bool operator==(const State&, const State&) = default;
};

struct StateHash {
  size_t operator()(const State& state) const {
    std::array<uint64_t, 3> words{};
    static_assert(sizeof(words) == sizeof(State));
    std::memcpy(words.data(), &state, sizeof(state));
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const uint64_t word : words) {
      hash = (hash ^ word) * 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// What a state means for the first rank, which holds most.
struct Held {
  // The slots that cut each dim, first cut first.
  std::array<std::array<uint8_t, kMaxSlots>, kMaxDims> cuts{};
  std::array<uint8_t, kMaxDims> num_cuts{};
  std::array<int64_t, kMaxDims> sizes{};  // of the local tensor
  int64_t bytes = 0;
};

// A step to `next`.
struct Move {
  State next;
  Held held;  // in `next`
  StepSize size;
};

// A set of slots, from the first to the last.
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

// All states of one tensor and the steps among them: those that lead to one layout, or to many at once.
//
// Partials and strided shards are made only where a target has them. To many targets they are final: once
// made, an axis keeps them, so that a path to a target has only steps that lead to that target.
class Space {
 public:
  // A set of slots whose ranks have a group.
  struct Unit {
    uint32_t slots;
    AxisSet axes;  // the same as mesh axes
    Slots list;    // the same one by one
  };
  using Visit = std::function<void(StepKind, const Unit&, const State& next)>;

  // Both throw std::invalid_argument for more axes or dims than a State holds. What is given outlives this.
  explicit Space(const Redistribution& task);
  // To layouts whose placements are Replicate, those of `source` and those of `vocabulary`; masks are passed
  // over.
  Space(const Mesh& mesh, const std::vector<int64_t>& shape, int64_t itemsize, const Layout& source,
        const std::vector<Placement>& vocabulary);

  const State& src() const { return src_; }
  // Of a space with one target.
  const State& dst() const { return dst_; }
  int num_slots() const { return num_slots_; }
  const std::vector<Unit>& units() const { return units_; }
  // The slot of a mesh axis, -1 if it holds one rank.
  int slot(int64_t axis) const;
  int64_t axis(int slot) const { return axis_.at(slot); }

  Held held(const State& state) const;

  int64_t num_ranks(uint32_t slots) const;
  // The fewest bytes that the first rank holds under any layout: every axis cuts the tensor.
  int64_t least_bytes() const;
  // The dims before `dim` are longer than one for the first rank under any layout.
  bool is_inner(int64_t dim) const;

  // Visits every step from `state`; one state may come several times.
  void expand(const State& state, const Held& held, const Visit& visit) const;
  // In a space with many targets: visits every exchange over two or three merged axes that leads from src.
  // The exchange has to be the last step.
  void expand_exchanges(const Visit& visit) const;

  // Whether the slot holds what was made for a target.
  bool is_final(const State& state, int slot) const {
    return state.place.at(slot) >= State::kFinalPartial || state.split.at(slot) >= first_final_split_;
  }
  // The same layout as state() writes it.
  State without_final(State state) const;

  // Of a layout whose split factors are those of src and the targets.
  State state(const Layout& layout) const;
  // The index of a split factor in State::split, -1 if neither src nor a target has it.
  int split(int64_t factor) const;
  // In a space with one target. Axes of one rank are laid out as in dst.
  Layout layout(const State& state) const;

  // A step over `unit` alone.
  Move move(StepKind kind, const Unit& unit, const State& before, const Held& held, const State& after) const;

  // The kind of step by which `slots` take other shards: permute if every rank's tensor goes to one rank as a
  // whole.
  StepKind kind_of_exchange(uint32_t slots, const State& before, const Held& held, const State& after) const;

 private:
  friend class Expansion;

  struct Strided {
    uint8_t dim;
    uint8_t split;
  };
  // What steps may make of a slot beside Replicate and plain shards.
  struct Made {
    std::vector<uint8_t> partials;  // places
    std::vector<Strided> strided;
  };

  Space(const Mesh& mesh, const std::vector<int64_t>& shape, int64_t itemsize);
  void add_units();
  bool has_one_target() const { return dst_layout_ != nullptr; }
  const Made& made(int slot) const { return made_[has_one_target() ? slot : 0]; }
  void learn_split_factors(const Layout& layout);
  void make_vocabulary(const std::vector<Placement>& vocabulary);
  void choose_dims(uint32_t used);
  bool cuts_evenly(const State& state, const Held& held, int64_t dim, uint32_t slots) const;
  StepSize step_size(StepKind kind, const Unit& unit, const State& before, const Held& held_before,
                     const State& after, const Held& held_after) const;

  const Mesh& mesh_;
  const std::vector<int64_t>& shape_;
  const int64_t itemsize_;
  const Layout* dst_layout_ = nullptr;
  int num_slots_ = 0;
  std::array<int64_t, kMaxSlots> axis_{};  // slot -> mesh axis
  std::array<int64_t, kMaxSlots> ranks_{};
  std::vector<int64_t> split_factors_{1};
  uint8_t first_final_split_ = UINT8_MAX;  // the split factors from here on are final
  uint8_t final_plain_ = 0;                // among them that of plain shards; 0 if it is not needed
  std::vector<Unit> units_;
  std::vector<int64_t> dims_;  // that steps may shard
  std::vector<Made> made_;     // of every slot, or of all alike
  State src_;
  State dst_;
};

}  // namespace funcol
