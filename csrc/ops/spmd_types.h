// Collectives between the local types that spmd_types gives a tensor along one mesh axis.
//
//   type           what the ranks hold                                          the type of its gradient
//   replicate R    the same tensor                                              partial
//   invariant I    the same tensor                                              invariant
//   varying V      a tensor each; together they are stacked along a dim         varying
//   shard S        a tensor each; together they are concatenated along a dim    shard
//   partial P      a tensor each; together they are its sum                     replicate
//
// A change from one type to another, and back for its gradient, from the type of the result's gradient to
// that of the input's:
//
//   P -> R  all_reduce          gradient  P -> R          V, S -> R  all_gather       gradient  P -> V, S
//   P -> I  all_reduce                    I -> R          V, S -> I  all_gather                 I -> V, S
//   I -> R  the input itself              P -> I          P -> V, S  reduce_scatter             V, S -> R
//   S -> S, V -> V  all_to_all            the same back   I -> V, S  this rank's part           V, S -> I
//
// On two ranks, S(0) -> S(1) of [[1, 2]] and [[3, 4]] gives [[1], [3]] and [[2], [4]], V -> V of [1, 2] and
// [3, 4] along dim 0 gives [1, 3] and [2, 4]; either sends once.
//
// PyTorch counterpart: none; torch.autograd.Function objects of the package.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "comm/group_ref.h"

namespace funcol::local_types {

enum class Type : int64_t { kReplicate, kInvariant, kVarying, kShard, kPartial };

// A type, and the dim of V and S.
struct PlacedType {
  Type type;
  int64_t dim;
};

// The dtype in which a change is made and that of its result; none: that of the input.
struct Dtypes {
  std::optional<at::ScalarType> during;
  std::optional<at::ScalarType> after;
};

struct Change {
  PlacedType from;
  PlacedType to;
  Dtypes forward;
  Dtypes backward;
  // The result of P -> S along a dim other than 0 lies in memory with that dim first, as before 0.3.1 of the
  // package; else all results are contiguous. The order of later sums depends on it.
  bool scatters_dim_first = false;
};

// Returns true if apply_change() supports `input`. The package's own function handles other calls, or raises.
bool supports(const at::Tensor& input, const Change& change, const c10d::ProcessGroup& group);

// Returns `input` after the change, pending if a collective makes it. The result needs a gradient if `input`
// does, and is differentiable again. The collective reads a copy unless the caller `keeps_input` unchanged
// until the collective has completed.
at::Tensor apply_change(const at::Tensor& input, const Change& change, const GroupPtr& group,
                        bool keeps_input);

}  // namespace funcol::local_types
