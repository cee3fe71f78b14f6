// Sizes along one dim of the parts that the ranks of a group have of a whole: found and checked.
//
// Symbols are kept, and what is asked of them becomes an assertion of the graph. ValueError naming `op` where
// split_sizes do not fit.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <vector>

#include "comm/process_group.h"

namespace funcol {

using SymSizes = std::vector<c10::SymInt>;

// A whole whose size along `dim` is `whole` is cut: equal shares where there are no split_sizes, which then
// must divide; else one size per rank that sum up to the whole.
SymSizes sizes_of_parts(const c10::SymInt& whole, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                        const c10d::ProcessGroup& group, const char* op);

// This rank's part has size `shard` along `dim`: every rank's has without split_sizes; else
// split_sizes[rank].
SymSizes sizes_of_shards(const c10::SymInt& shard, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                         const c10d::ProcessGroup& group, const char* op);

// Raises unless `split_sizes`, the argument of this name, has one size for each rank.
void check_split_sizes(c10::SymIntArrayRef split_sizes, const char* name, const c10d::ProcessGroup& group,
                       const char* op);

c10::SymInt sum(c10::SymIntArrayRef sizes);

}  // namespace funcol
