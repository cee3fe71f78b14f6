// PyTorch's choice among the compositions of the rows that its own rule gives for one mesh axis.
//
// composition_search.h makes funcol's choice; this file makes the choice of stock PyTorch, tie for tie.
// PyTorch lists the full product of the rows, prices every composition and takes one; here a search finds the
// same one. PyTorch's counterparts: expand_to_full_mesh_op_strategy (torch.distributed.tensor._ops.utils) and
// _select_min_cost_strategy (torch.distributed.tensor._sharding_prop).
//
// Worked case, add of two f32[8, 8] on one axis of 2 ranks, "S0" and "P(sum)", rows R <- R,R; S0 <- S0,S0;
// S1 <- S1,S1; P <- P,P. The second row costs a reduce_scatter of the second tensor, the third an exchange
// and a reduce_scatter, the first a gather and an all_reduce. The fourth has no price: PyTorch makes no
// partials of shards by itself. The choice is S0 <- S0,S0.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "layout/layout.h"
#include "propagation/rule.h"

namespace funcol {

// A positional or keyword tensor of the call, including the tensors of out=.
struct UpstreamOperand {
  TensorMeta meta;
  Layout source;
  bool strided_as_order = false;  // strided shards of the source mean a shard order
  bool is_positional = true;      // moves of keyword tensors are priced, but do not break ties
  bool is_on_other_mesh = false;  // on another mesh: never moves, whatever the rows say
};

struct UpstreamQuestion {
  Mesh mesh;
  std::vector<UpstreamOperand> operands;  // in the order of Row::inputs
  size_t num_outputs = 0;

  // The rows in the order of the rule. If no row is all Replicate, that row is added in front.
  std::vector<Row> rows;
  // The split factors that a row with any_shard() expands to, in PyTorch's order. If empty, no tensor of the
  // call is sharded, and such rows are dropped.
  std::vector<int64_t> split_factors;
  bool strided_as_order = false;  // strided shards in rows mean a shard order
  // Outputs without a tensor, such as gradients that were not requested.
  std::vector<bool> lacks_output;
  // True if operands that keep their placements may leave ranks without elements.
  bool allows_uneven = false;

  bool is_in_place = false;  // the first operand is pinned, and the first output has its placements
  std::vector<std::optional<std::vector<Placement>>> required;  // of outputs given by out=; may be short
  // True to prefer a composition without moves among those that cost nothing. PyTorch prefers one for an
  // operator on tensors, but not for the elements of lists.
  bool prefers_unmoved = true;
  // PyTorch's filter, which returns true if it accepts a composition: a row for each mesh axis. Null if it
  // accepts all.
  std::function<bool(const std::vector<Row>&)> accepts;
};

struct UpstreamChoice {
  std::vector<Row> rows;      // of each mesh axis
  std::vector<double> costs;  // of each operand; kImpossible where PyTorch has no price
};

// Returns PyTorch's choice. Returns nullopt if no composition is legal, or if PyTorch would raise an error
// while it lists them. A composition is legal if:
//
// - A tensor is Partial in one way only; sum and avg may meet.
// - Every rank holds a part of each sharded operand, unless it keeps its placements and `allows_uneven`.
// - An output has placements on all axes, or on none.
// - `is_in_place`, `required` and `accepts` hold.
//
// The choice:
//
// 1. if `prefers_unmoved`, the last composition, in the order of the full product, that costs nothing and
//    keeps all positional operands;
// 2. else the first one of the least total cost, summed in the order of the operands. If all are impossible,
//    the first one.
//
// row_search.h searches. The bound of a node adds up the least cost of each operand's layouts that begin with
// its rows. Sums are rounded like PyTorch's, so that ties are PyTorch's ties.
std::optional<UpstreamChoice> upstream_choice(const UpstreamQuestion& question);

}  // namespace funcol
