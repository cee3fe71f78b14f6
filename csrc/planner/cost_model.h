// What a step of a plan costs: a number that plans are compared by.
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
  kAllToAll,       // S(a) -> S(b), or from one order of axes to another
  kPermute,        // every rank's whole tensor goes to one other rank: shards that change places
  kSplit,          // R -> S, nothing is sent
  kToPartial,      // R -> P, nothing is sent
  kEmbed,          // S -> P, nothing is sent: the shard among neutral elements
  kApplyMask,      // MaskP -> P, nothing is sent
  kMask,           // R -> MaskP, nothing is sent
};

std::string_view to_string(StepKind kind);
bool communicates(StepKind kind);

// What a cost model is told of a step. Bytes are those of the rank that holds most; a dim that does not
// divide is counted as if every rank held as much as the first.
struct StepSize {
  StepKind kind;
  AxisSet axes = 0;
  int64_t bytes_before = 0;
  int64_t bytes_after = 0;
  int64_t bytes_whole = 0;   // what is gathered, scattered, reduced or exchanged: the ranks' shares together,
                             // or the larger of a rank's tensors before and after for all_to_all and permute
  int64_t bytes_copied = 0;  // by layout changes before and after the collective, and by local steps
};

// The reference's model: a number a collective, whatever its size: all_reduce 4, all_gather 2, reduce_scatter
// 2, all_to_all and permute 1, local steps 0.
struct StepCounts {
  friend bool operator==(const StepCounts&, const StepCounts&) = default;
};

// Microseconds that a message takes: latency_us + bytes * us_per_byte.
struct LinkCost {
  double latency_us = 0;
  double us_per_byte = 0;

  friend bool operator==(const LinkCost&, const LinkCost&) = default;
};

// One mesh axis. Bytes are what the busiest rank sends: (n - 1) / n of the gathered or scattered tensor for a
// gather, a scatter or an exchange of all with all; twice that for an all_reduce; all of it for a permute.
struct AxisCost {
  LinkCost all_gather;
  LinkCost reduce_scatter;
  LinkCost all_reduce;
  LinkCost all_to_all;
  LinkCost permute;

  friend bool operator==(const AxisCost&, const AxisCost&) = default;
};

// Latency and bandwidth of every axis and collective, in microseconds; local copies are charged too. A
// collective over merged axes has the latency of its slowest axis, and sends over slow axes only what has to
// cross them, so that it never costs more than the same collective axis by axis.
struct AlphaBeta {
  std::vector<AxisCost> axes;
  LinkCost copy;

  friend bool operator==(const AlphaBeta&, const AlphaBeta&) = default;
};

// DTensorCosts prices a redistribution as a whole, where that is asked for; plans are compared by its rings'
// latencies and bandwidths.
using CostModel = std::variant<StepCounts, AlphaBeta, DTensorCosts>;

// 6.6 us and 87.7 GB/s a collective, 0.6 us more for every further rank: PyTorch's numbers for one host
// (torch.distributed.tensor._collective_utils.MeshTopoInfo); copies at 500 GB/s after 2 us.
AlphaBeta default_alpha_beta(const Mesh& mesh);

// The same with latencies lowered until no collective costs more than others that together do the same:
// all_reduce <= reduce_scatter + all_gather, permute and all_to_all <= all_gather.
AlphaBeta with_triangle_inequality(AlphaBeta model);

// A cost model made ready for one mesh. Throws std::invalid_argument if the model knows another number of
// axes.
class Costs {
 public:
  Costs(const CostModel& model, const Mesh& mesh);

  // The cost of a step; of axes that hold one rank, that of its copies.
  double of(const StepSize& step) const;

  // Never more than the latency of a step of that kind over those axes.
  double latency(StepKind kind, AxisSet axes) const;
  // Never more than what any step pays for a byte that a rank receives.
  double least_us_per_byte() const { return least_us_per_byte_; }

  // The axes of a model that prices whole redistributions by dtensor_cost(); empty for other models.
  const std::vector<RingAxis>& rings() const { return rings_; }

 private:
  // links_[axes][kind]: us_per_byte already holds the share of the bytes that is sent.
  std::vector<std::array<LinkCost, 5>> links_;
  LinkCost copy_;
  std::vector<RingAxis> rings_;
  double least_us_per_byte_ = 0;
};

}  // namespace funcol
