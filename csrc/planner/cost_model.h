// Cost models: the cost of one step of a redistribution plan.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "layout/mesh.h"
#include "planner/dtensor_costs.h"

namespace funcol {

enum class StepKind : uint8_t {
  kAllGather,      // S -> R
  kReduceScatter,  // P -> S
  kAllReduce,      // P -> R
  kAllToAll,       // S(a) -> S(b), or a change of the shard order
  kPermute,        // shards change places: every rank sends its entire tensor to one rank
  kSplit,          // R -> S, local
  kToPartial,      // R -> P, local
  kEmbed,          // S -> P, local: the shard is surrounded by neutral elements
  kApplyMask,      // MaskP -> P, local
  kMask,           // R -> MaskP, local
};

std::string_view to_string(StepKind kind);
bool communicates(StepKind kind);

// The size of a step: the input of a cost model. Bytes are those of the first rank, which holds most; uneven
// shards count as if every rank held as much.
struct StepSize {
  StepKind kind;
  AxisSet axes = 0;
  int64_t bytes_before = 0;
  int64_t bytes_after = 0;
  int64_t bytes_full = 0;    // of the gathered, scattered or reduced tensor; for all_to_all and permute, of
                             // the larger one of a rank's tensors before and after
  int64_t bytes_copied = 0;  // into and out of rank-major order around a collective, or by a local step
};

// PyTorch's step-count model. Each collective has a fixed cost, whatever its size: all_reduce 4, all_gather
// 2, reduce_scatter 2, all_to_all and permute 1. Local steps cost 0.
struct StepCounts {
  friend bool operator==(const StepCounts&, const StepCounts&) = default;
};

// The cost of a message in microseconds: latency_us + bytes * us_per_byte.
struct LinkCost {
  double latency_us = 0;
  double us_per_byte = 0;

  friend bool operator==(const LinkCost&, const LinkCost&) = default;
};

// The costs of collectives on one mesh axis of n ranks. Each counts the bytes that the busiest rank sends:
// (n - 1) / n of the full tensor for all_gather, reduce_scatter and all_to_all, twice that for all_reduce,
// and all of it for permute.
struct AxisCost {
  LinkCost all_gather;
  LinkCost reduce_scatter;
  LinkCost all_reduce;
  LinkCost all_to_all;
  LinkCost permute;

  friend bool operator==(const AxisCost&, const AxisCost&) = default;
};

// The alpha-beta model: latency and bandwidth of every collective on every axis, and of local copies. A
// collective over merged axes has the latency of its slowest axis and sends over a slow axis only the bytes
// that have to cross it, so it never costs more than the same collective axis by axis.
struct AlphaBeta {
  std::vector<AxisCost> axes;
  LinkCost copy;

  friend bool operator==(const AlphaBeta&, const AlphaBeta&) = default;
};

// A cost model. Under DTensorCosts, the latency and bandwidth of a ring price a single step, and
// dtensor_cost() prices an entire redistribution.
using CostModel = std::variant<StepCounts, AlphaBeta, DTensorCosts>;

// Returns PyTorch's numbers for one host (torch.distributed.tensor._collective_utils.MeshTopoInfo): a
// collective takes 6.6 us, 0.6 us more for each further rank, and 87.7 GB/s. A copy takes 2 us and 500 GB/s.
AlphaBeta default_alpha_beta(const Mesh& mesh);

// Returns `model` with costs lowered until no collective costs more than a sequence of others with the same
// result: all_reduce <= reduce_scatter + all_gather; permute, all_to_all <= all_gather.
AlphaBeta with_triangle_inequality(AlphaBeta model);

// A cost model prepared for one mesh. Throws std::invalid_argument if its number of axes differs.
class Costs {
 public:
  Costs(const CostModel& model, const Mesh& mesh);

  // Returns the cost of a step. On axes of one rank, only the copies count.
  double of(const StepSize& step) const;

  // Returns a lower bound of the cost of one byte that a rank receives.
  double least_us_per_byte() const { return least_us_per_byte_; }

  // Returns the rings of DTensorCosts, which dtensor_cost() takes. Empty for other models.
  const std::vector<RingAxis>& rings() const { return rings_; }

 private:
  // links_[axes][kind]; us_per_byte is already multiplied by the share of the bytes that is sent.
  std::vector<std::array<LinkCost, 5>> links_;
  LinkCost copy_;
  std::vector<RingAxis> rings_;
  double least_us_per_byte_ = 0;
};

}  // namespace funcol
