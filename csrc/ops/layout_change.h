// Tensor order to rank-major order and back, on tensors: one pass over the data.
#pragma once

#include <ATen/core/Tensor.h>

namespace funcol {

// True if blocks of ranks that are concatenated along `dim` of a tensor with these sizes lie as they do
// along dim 0, so that no layout change is needed: every size before `dim` is 1.
bool is_rank_major(at::IntArrayRef sizes, int64_t dim);

// `gathered` holds the ranks' shards one after the other; fills `out`, where they are concatenated
// along `dim`. Both contiguous, same number of elements. On CUDA it runs on the current stream.
void merge_shards(const at::Tensor& gathered, const at::Tensor& out, int64_t num_ranks, int64_t dim);

// merge_shards() within `out`, which holds the shards one after the other. For few bytes on the CPU, which
// are merged faster than memory for another tensor is found: merges_in_place() says for which tensors.
bool merges_in_place(const at::Tensor& gathered);
void merge_shards_in_place(const at::Tensor& out, int64_t num_ranks, int64_t dim);

// A contiguous tensor that holds the num_ranks equal blocks of `tensor` along `dim` one after the other;
// dim 0 is num_ranks times a block's. `tensor` may have any strides.
at::Tensor split_shards(const at::Tensor& tensor, int64_t num_ranks, int64_t dim);

}  // namespace funcol
