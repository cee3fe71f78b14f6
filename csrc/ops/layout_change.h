// Layout changes from tensor order to rank-major order and back, on tensors, in one pass over the data.
#pragma once

#include <ATen/core/Tensor.h>

namespace funcol {

// Returns true if blocks of ranks that are concatenated along `dim` of a tensor with these sizes lie in
// memory as along dim 0, so that no layout change is needed: every size before `dim` is 1.
bool is_rank_major(at::IntArrayRef sizes, int64_t dim);

// Fills `out` with the ranks' shards concatenated along `dim`; `gathered` holds them one after the other.
// Both are contiguous, with the same number of elements. On CUDA, runs on the current stream.
void merge_shards(const at::Tensor& gathered, const at::Tensor& out, int64_t num_ranks, int64_t dim);

// Merges shards within `out`, which holds them one after the other. For few bytes on the CPU, which are
// merged faster than another tensor is allocated: merges_in_place() returns true for such tensors.
bool merges_in_place(const at::Tensor& gathered);
void merge_shards_in_place(const at::Tensor& out, int64_t num_ranks, int64_t dim);

// Returns a contiguous tensor that holds the num_ranks equal blocks of `tensor` along `dim` one after the
// other; dim 0 is num_ranks times a block's. `tensor` may have any strides.
at::Tensor split_shards(const at::Tensor& tensor, int64_t num_ranks, int64_t dim);

}  // namespace funcol
