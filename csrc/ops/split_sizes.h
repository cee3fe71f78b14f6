// The sizes, along one dim, of the ranks' parts of a whole.
//
// Symbols are kept; a check of symbols becomes an assertion of the graph. ValueError naming `op` where
// split_sizes do not fit.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <vector>

#include "comm/group_ptr.h"

namespace funcol {

using SymSizes = std::vector<c10::SymInt>;

// Parts of a whole of size `whole` along `dim`: split_sizes, which have to sum up to the whole; without them
// equal shares, and the number of ranks has to divide the whole.
SymSizes sizes_of_parts(const c10::SymInt& whole, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                        const c10d::ProcessGroup& group, const char* op);

// Parts where this rank's has size `shard` along `dim`: split_sizes, whose entry for this rank has to be
// `shard`; without them every rank's part has that size.
SymSizes sizes_of_shards(const c10::SymInt& shard, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                         const c10d::ProcessGroup& group, const char* op);

// Raises unless `split_sizes`, the argument of this name, has one size for each rank.
void check_split_sizes(c10::SymIntArrayRef split_sizes, const char* name, const c10d::ProcessGroup& group,
                       const char* op);

// Raises unless this rank sends as many rows to itself as it receives from itself.
void check_own_splits(at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                      const c10d::ProcessGroup& group, const char* op);

c10::SymInt sum(c10::SymIntArrayRef sizes);

// Parts of the shape of `like` but for their sizes along `dim`, one a rank.
struct TracedParts {
  TracedParts(const at::Tensor& like, int64_t dim, SymSizes sizes);

  // Concatenates `flat_parts`, the elements of each part, along `dim`.
  at::Tensor concatenated(std::vector<at::Tensor> flat_parts) const;

  int64_t dim;
  SymSizes sizes;
  SymSizes numels;
  SymSizes shape;  // of any part, but for `dim`
};

}  // namespace funcol
