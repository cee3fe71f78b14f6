// How one mesh axis holds a tensor: PyTorch's torch.distributed.tensor.placement_types as values.
//
//   R          Replicate: every rank of the axis holds the whole.
//   S(d)       Shard: dim d is cut into chunks as torch.chunk does, a chunk a rank, the last ones smaller.
//   _S(d, f)   strided Shard: dim d is cut into f pieces, and a rank holds its chunk of every piece.
//   P(op)      Partial: every rank holds a tensor of full size; the value is their reduction with `op`.
//   MaskP(op)  masked Partial: P(op) once the rank's mask has been applied.
//   _NormP(p)  norm Partial: the value is the p-norm of what the ranks hold, (sum of x^p)^(1/p). Known to
//              rules, not to the planner: who has one reduces it by itself.
//
// Worked case, 8 rows on an axis of 2 ranks: S(0) is {0 1 2 3}, {4 5 6 7}; _S(0, 2) is {0 1 4 5}, {2 3 6 7}.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace funcol {

enum class PlacementKind : uint8_t { kReplicate, kShard, kPartial };

// The reductions that PyTorch's Partial names.
enum class PartialOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor };

// The order of a norm as it was given: 2 and 2.0 differ in how they print.
struct NormOrder {
  double value = 0;  // 0 for none: what is counted adds up
  bool is_integer = false;

  friend bool operator==(const NormOrder&, const NormOrder&) = default;
};

struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  PartialOp op = PartialOp::kSum;  // of kPartial
  int64_t dim = 0;                 // of kShard; counted from 0
  int64_t split_factor = 1;        // of kShard; 1 is the plain Shard
  uint64_t mask = 0;               // of kPartial: which mask has to be applied first, 0 for none
  NormOrder norm;                  // of kPartial: the op is kSum, of powers

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
  bool is_partial() const { return kind == PlacementKind::kPartial; }
  bool is_norm() const { return norm.value != 0; }

  friend bool operator==(const Placement&, const Placement&) = default;
};

// Two Partials whose reductions may be pending at once, since the result does not depend on which is done
// first.
bool commute(PartialOp a, PartialOp b);
// The same of two placements that are Partials; norms commute with those of the same order.
bool commute(const Placement& a, const Placement& b);

std::string_view to_string(PartialOp op);
// Throws std::invalid_argument that lists the names there are.
PartialOp partial_op(std::string_view name);

// As PyTorch prints it: "R", "S(0)", "_S(0, 2)", "P(sum)", "_NormP(2)"; a mask as "MaskP(sum)".
std::string to_string(const Placement& placement);

// Reads "S0,R", "S(0), P(max)", "_S(0, 2),P": what to_string() writes of placements without mask or norm;
// brackets around a lone dim and "(sum)" may be left out. Throws std::invalid_argument naming the word that
// is no placement.
std::vector<Placement> parse_placements(std::string_view text);

}  // namespace funcol
