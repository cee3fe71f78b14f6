#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "kernels/cuda/error_text.h"
#include "kernels/cuda/move_vectors.h"
#include "kernels/cuda/rank_major.h"

namespace funcol::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Threads follow tensor order for merges and splits alike: a warp then touches one run of the tensor and one
// run a rank, however short the rows are. In rank-major order short rows would scatter a warp over the
// tensor.
template <typename Move>
__global__ void __launch_bounds__(kThreads) run(const Move move) {
  using Index = typename Move::Index;
  const Index step = Index{gridDim.x} * kThreads;
  for (Index i = Index{blockIdx.x} * kThreads + threadIdx.x; i < move.num_vectors; i += step) {
    move(i);
  }
}

template <typename Move>
const char* launch(Move move, cudaStream_t stream) {
  int device = 0;
  int num_multiprocessors = 0;
  if (const char* error = error_text(cudaGetDevice(&device))) {
    return error;
  }
  if (const char* error =
          error_text(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device))) {
    return error;
  }
  constexpr int64_t kBlocksPerMultiprocessor = 2048 / kThreads;
  const auto num_vectors = static_cast<int64_t>(move.num_vectors);
  const int64_t num_blocks =
      std::min((num_vectors + kThreads - 1) / kThreads, kBlocksPerMultiprocessor * num_multiprocessors);
  void* arguments[] = {&move};
  return error_text(cudaLaunchKernel(reinterpret_cast<const void*>(&run<Move>),
                                     dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads), arguments, 0,
                                     stream));
}

template <Change kChange, typename Vector>
const char* launch(const void* in, void* out, const ShardShape& shape, cudaStream_t stream) {
  if (shape.num_bytes() / int64_t{sizeof(Vector)} <= std::numeric_limits<int32_t>::max()) {
    return launch(MoveVectors<kChange, Vector, uint32_t>(in, out, shape), stream);
  }
  return launch(MoveVectors<kChange, Vector, uint64_t>(in, out, shape), stream);
}

template <Change kChange>
const char* change_layout(const void* in, void* out, const ShardShape& shape, void* opaque_stream) {
  if (shape.num_bytes() == 0) {
    return nullptr;
  }
  auto* const stream = static_cast<cudaStream_t>(opaque_stream);
  if (shape.num_ranks == 1 || shape.outer == 1) {  // both orders agree
    return error_text(
        cudaMemcpyAsync(out, in, static_cast<size_t>(shape.num_bytes()), cudaMemcpyDeviceToDevice, stream));
  }
  const uintptr_t alignment = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out) |
                              static_cast<uintptr_t>(shape.row_bytes);
  if (alignment % 16 == 0) {
    return launch<kChange, uint4>(in, out, shape, stream);
  }
  if (alignment % 8 == 0) {
    return launch<kChange, uint2>(in, out, shape, stream);
  }
  if (alignment % 4 == 0) {
    return launch<kChange, uint32_t>(in, out, shape, stream);
  }
  if (alignment % 2 == 0) {
    return launch<kChange, uint16_t>(in, out, shape, stream);
  }
  return launch<kChange, uint8_t>(in, out, shape, stream);
}

}  // namespace

const char* merge_shards(const void* in, void* out, const ShardShape& shape, void* stream) {
  return change_layout<Change::kMerge>(in, out, shape, stream);
}

const char* split_shards(const void* in, void* out, const ShardShape& shape, void* stream) {
  return change_layout<Change::kSplit>(in, out, shape, stream);
}

}  // namespace funcol::kernels::cuda
