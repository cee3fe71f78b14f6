// The planner's view of a layout: small, flat, comparable; the steps that lead from one to the next.
//
// Axes that hold one rank are left out. An axis is known here by its place among the others ("slot").
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
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

  std::array<uint8_t, kMaxSlots> place{};
  std::array<uint8_t, kMaxSlots> split{};     // index into Space::split_factors
  std::array<uint8_t, kMaxSlots> position{};  // of this cut among those of its dim

  static constexpr uint8_t of(PartialOp op) { return kPartial + static_cast<uint8_t>(op); }

  bool is_shard(int slot) const { return place.at(slot) < kMaxDims; }
  bool is_replicate(int slot) const { return place.at(slot) == kReplicate; }
  bool is_partial(int slot) const { return place.at(slot) >= kPartial; }
  PartialOp op(int slot) const { return static_cast<PartialOp>(place.at(slot) - kPartial); }

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

// All states of one redistribution and the steps among them.
class Space {
 public:
  // A set of slots whose ranks have a group.
  struct Unit {
    uint32_t slots;
    AxisSet axes;  // the same as mesh axes
  };

  // Throws std::invalid_argument for more axes or dims than a State holds.
  explicit Space(const Redistribution& task);

  const State& src() const { return src_; }
  const State& dst() const { return dst_; }
  int num_slots() const { return num_slots_; }
  const std::vector<Unit>& units() const { return units_; }

  Held held(const State& state) const;

  int64_t num_ranks(uint32_t slots) const;
  // The fewest bytes that the first rank holds under any layout: every axis cuts the tensor.
  int64_t least_bytes() const;
  // The dims before `dim` are longer than one for the first rank under any layout.
  bool is_inner(int64_t dim) const;

  // Appends every step from `state` to `moves`.
  void expand(const State& state, std::vector<Move>& moves) const;

  // Of a layout whose split factors are those of src and dst.
  State state(const Layout& layout) const;
  // Axes of one rank are laid out as in dst.
  Layout layout(const State& state) const;

  // A step over `unit` alone.
  Move move(StepKind kind, const Unit& unit, const State& before, const Held& held, const State& after) const;

  // The kind of step by which `slots` take other shards: permute if every rank's tensor goes to one rank as a
  // whole.
  StepKind kind_of_exchange(uint32_t slots, const State& before, const Held& held, const State& after) const;

 private:
  friend class Expansion;

  void learn_split_factors(const Layout& layout);
  bool cuts_evenly(const State& state, const Held& held, int64_t dim, uint32_t slots) const;
  StepSize step_size(StepKind kind, const Unit& unit, const State& before, const Held& held_before,
                     const State& after, const Held& held_after) const;

  const Redistribution& task_;
  int num_slots_ = 0;
  std::array<int64_t, kMaxSlots> axis_{};  // slot -> mesh axis
  std::array<int64_t, kMaxSlots> ranks_{};
  std::vector<int64_t> split_factors_{1};
  std::vector<Unit> units_;
  std::vector<int64_t> dims_;  // that steps may shard
  State src_;
  State dst_;
};

}  // namespace funcol
