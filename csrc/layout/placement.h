// The placement of a tensor on one mesh axis: torch.distributed.tensor.placement_types as values.
//
// - R, Replicate: every rank of the axis holds the full tensor.
// - S(d), Shard: dim d is cut into one chunk per rank, as by torch.chunk. The last chunks may be smaller.
// - _S(d, f), strided Shard: dim d is cut into f pieces, and each rank holds its chunk of every piece.
// - P(op), Partial: every rank holds a tensor of full size. The value is the reduction of these with `op`.
// - MaskP(op), masked Partial: P(op) after each rank has applied its mask.
// - _NormP(p), norm Partial: the value is the p-norm over the ranks' tensors, (sum of x^p)^(1/p). Rules
//   make it. The planner refuses it, so the caller has to reduce it.
//
// Worked case: 8 rows on an axis of 2 ranks. S(0) is {0 1 2 3}, {4 5 6 7}; _S(0, 2) is {0 1 4 5}, {2 3 6 7}.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace funcol {

enum class PlacementKind : uint8_t { kReplicate, kShard, kPartial };

// The reductions that PyTorch's Partial names.
enum class PartialOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor };

// The order of a norm. 2 and 2.0 are the same norm but print differently.
struct NormOrder {
  double value = 0;  // 0: not a norm Partial (partial counts of a 0-norm are plain sums)
  bool is_integer = false;

  friend bool operator==(const NormOrder&, const NormOrder&) = default;
};

struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  PartialOp op = PartialOp::kSum;  // of kPartial
  int64_t dim = 0;                 // of kShard; counted from 0
  int64_t split_factor = 1;        // of kShard; 1 is the plain Shard
  uint64_t mask = 0;               // of kPartial: the id of the mask to apply before reducing, 0 for none
  NormOrder norm;                  // of kPartial: the norm whose powers are summed; the op is kSum

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim, int64_t split_factor = 1) {
    return {PlacementKind::kShard, PartialOp::kSum, dim, split_factor, 0, {}};
  }
  static Placement partial(PartialOp op = PartialOp::kSum, uint64_t mask = 0) {
    return {PlacementKind::kPartial, op, 0, 1, mask, {}};
  }
  static Placement norm_partial(NormOrder order) {
    return {PlacementKind::kPartial, PartialOp::kSum, 0, 1, 0, order};
  }

  bool is_replicate() const { return kind == PlacementKind::kReplicate; }
  bool is_shard() const { return kind == PlacementKind::kShard; }
  bool is_strided() const { return split_factor != 1; }
  bool is_partial() const { return kind == PlacementKind::kPartial; }
  bool is_norm() const { return norm.value != 0; }

  friend bool operator==(const Placement&, const Placement&) = default;
};

// Returns true if a tensor may be Partial with both reductions on two axes: their order does not change the
// result.
bool commute(PartialOp a, PartialOp b);
// Returns the same for two placements that are Partial. A norm commutes with norms of the same order.
bool commute(const Placement& a, const Placement& b);

std::string_view to_string(PartialOp op);
// Returns the reduction called `name`. Throws std::invalid_argument, listing all names, if there is none.
PartialOp partial_op(std::string_view name);

// Returns the placement as PyTorch prints it: "R", "S(0)", "_S(0, 2)", "P(sum)", "_NormP(2)", "MaskP(sum)".
std::string to_string(const Placement& placement);

// Reads a list of placements as to_string() writes them, separated by commas: "S(0), P(max)". "S0" and "P"
// are short for "S(0)" and "P(sum)". Masks and norms cannot be written. Throws std::invalid_argument naming
// the first word that is not a placement.
std::vector<Placement> parse_placements(std::string_view text);

}  // namespace funcol
