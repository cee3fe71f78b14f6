// Maps of dims: where the dims of a tensor go in the result of an operator.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "propagation/rules/row_list.h"

namespace funcol {

// The dim in the result of each dim of a call's first tensor; nullopt for a dim that cannot be sharded.
using DimMap = std::vector<std::optional<int64_t>>;
using MakeDimMap = DimMap (*)(const OpCall&);

DimMap same_dims(int64_t num_dims);
// Maps all dims but `removed`; later dims close up.
DimMap without_dims(int64_t num_dims, const std::vector<int64_t>& removed);
// Maps all dims to themselves, except those in `unsharded`, which every rank needs in full.
DimMap with_unsharded_dims(int64_t num_dims, const std::vector<int64_t>& unsharded);

// Maps dims to a result whose dim `i` is dim sources[i].
DimMap permutation(const std::vector<int64_t>& sources);

// Returns the dims of the call's first tensor that an argument names, counted from 0.
std::vector<int64_t> dims_argument(const OpCall& call, std::string_view name);

// Maps the dims of the call's first tensor by the arguments "dim", or "dim1" and "dim2".
DimMap without_dim(const OpCall& call);
DimMap with_unsharded_dim(const OpCall& call);
DimMap with_inserted_dim(const OpCall& call);
DimMap without_diagonal_dims(const OpCall& call);
// Maps the dims of the call's first tensor to themselves, except that the two named by these arguments swap.
DimMap with_swapped_dims(const OpCall& call, std::string_view first, std::string_view second);

// Adds a row for each dim that the map keeps: all inputs are sharded along it, or `argument` alone.
void add_mapped_dims(RowList& rows, const DimMap& map);
void add_mapped_dims(RowList& rows, const DimMap& map, std::string_view argument);
// Adds a row for each dim of the result that all inputs have with the size of the first input: all outputs
// and inputs are sharded along it.
void add_common_dims(RowList& rows, const DimMap& map);

// Returns the shape to which these tensors of the call are broadcast.
std::vector<int64_t> broadcast_shape(const OpCall& call, const std::vector<size_t>& tensors);

// Returns the placement of a tensor that is broadcast to `num_dims` dims, of which `dim` is sharded. A tensor
// that lacks the dim, or has another size there, is replicated.
Placement broadcast_shard(const TensorMeta& meta, int64_t dim, int64_t num_dims, int64_t size);
// Returns the same; the only other size that a tensor may have there is 1.
Placement broadcast_shard(const TensorMeta& meta, int64_t dim, int64_t num_dims);

}  // namespace funcol
