// Copies between tensor order and rank-major order in memory.
//
// A collective sends and receives one contiguous block per rank. Gathering or scattering along a dim
// other than 0 therefore needs a transpose of row blocks, which are plain bytes here:
//
//   merge_shards:  in[rank][outer][row]  ->  out[outer][rank][row]    (after a gather)
//   split_shards:  in[outer][rank][row]  ->  out[rank][outer][row]    (before a scatter)
//
// Worked case, 2 ranks that each hold a (2, 3) shard, gathered along dim 1: outer = 2, row_bytes = 3 *
// itemsize; in = rank 0's (2, 3) then rank 1's (2, 3); out = the (2, 6) tensor.
//
// `in` and `out` are contiguous, each num_ranks * outer * row_bytes bytes, and do not overlap. They need
// the alignment of their element type only. The kernels know no dtypes, groups or PyTorch.
#pragma once

#include <cstdint>

namespace funcol::kernels {

struct ShardShape {
  int64_t num_ranks = 1;  // blocks to merge, or to split into
  int64_t outer = 1;      // product of the sizes before the gathered dim
  int64_t row_bytes = 0;  // bytes of one rank's share at one outer index

  int64_t num_rows() const { return num_ranks * outer; }
  int64_t num_bytes() const { return num_rows() * row_bytes; }
};

enum class Change { kMerge, kSplit };

// Copies the rows [begin, end) of num_rows() on the CPU, so that a caller can share the rows among threads.
// Rows are counted in tensor order: row = outer index * num_ranks + rank. kernels/cuda_library.h has the CUDA
// functions.
void merge_shards(const void* in, void* out, const ShardShape& shape, int64_t begin, int64_t end);
void split_shards(const void* in, void* out, const ShardShape& shape, int64_t begin, int64_t end);

}  // namespace funcol::kernels
