#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "kernels/rank_major.h"

namespace funcol::kernels {
namespace {

enum class Change { kMerge, kSplit };

constexpr int kThreads = 256;

// Division by a divisor that is fixed at launch.
template <typename Index>
struct Divider {
  Index divisor;

  explicit Divider(Index d) : divisor(d) {}

  __device__ Index quotient(Index n) const { return n / divisor; }
};

// The 32-bit form multiplies by the reciprocal, rounded up, because two divisions would take longer than the
// copy of a narrow vector. Exact for n < 2^31 (Granlund and Montgomery, "Division by Invariant Integers").
template <>
struct Divider<uint32_t> {
  uint32_t divisor;
  uint32_t magic;
  uint32_t shift = 0;

  explicit Divider(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) {
      ++shift;
    }
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
};

// Threads follow tensor order for merges and splits alike: a warp then touches one run of the tensor and one
// run a rank, however short the rows are. In rank-major order short rows would scatter a warp over the
// tensor.
template <Change kChange, typename Vector, typename Index>
__global__ void __launch_bounds__(kThreads)
    move_vectors(const Vector* __restrict__ in, Vector* __restrict__ out, Index num_vectors, Index outer,
                 Divider<Index> num_ranks, Divider<Index> row_vectors) {
  const Index step = Index{gridDim.x} * kThreads;
  for (Index in_tensor = Index{blockIdx.x} * kThreads + threadIdx.x; in_tensor < num_vectors;
       in_tensor += step) {
    const Index row = row_vectors.quotient(in_tensor);
    const Index within = in_tensor - row * row_vectors.divisor;
    const Index o = num_ranks.quotient(row);
    const Index rank = row - o * num_ranks.divisor;
    const Index by_rank = (rank * outer + o) * row_vectors.divisor + within;
    if constexpr (kChange == Change::kMerge) {
      out[in_tensor] = in[by_rank];
    } else {
      out[by_rank] = in[in_tensor];
    }
  }
}

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <Change kChange, typename Vector, typename Index>
const char* launch_indexed(const void* in, void* out, const ShardShape& shape, cudaStream_t stream) {
  int device = 0;
  int num_multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return last_error();
  }
  constexpr int64_t kBlocksPerMultiprocessor = 2048 / kThreads;
  const int64_t num_vectors = shape.num_bytes() / int64_t{sizeof(Vector)};
  const int64_t num_blocks =
      std::min((num_vectors + kThreads - 1) / kThreads, kBlocksPerMultiprocessor * num_multiprocessors);
  move_vectors<kChange, Vector, Index><<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(
      static_cast<const Vector*>(in), static_cast<Vector*>(out), static_cast<Index>(num_vectors),
      static_cast<Index>(shape.outer), Divider<Index>(static_cast<Index>(shape.num_ranks)),
      Divider<Index>(static_cast<Index>(shape.row_bytes / int64_t{sizeof(Vector)})));
  return last_error();
}

template <Change kChange, typename Vector>
const char* launch(const void* in, void* out, const ShardShape& shape, cudaStream_t stream) {
  if (shape.num_bytes() / int64_t{sizeof(Vector)} <= std::numeric_limits<int32_t>::max()) {
    return launch_indexed<kChange, Vector, uint32_t>(in, out, shape, stream);
  }
  return launch_indexed<kChange, Vector, uint64_t>(in, out, shape, stream);
}

template <Change kChange>
const char* change_layout(const void* in, void* out, const ShardShape& shape, void* opaque_stream) {
  if (shape.num_bytes() == 0) {
    return nullptr;
  }
  auto* const stream = static_cast<cudaStream_t>(opaque_stream);
  if (shape.num_ranks == 1 || shape.outer == 1) {  // both orders agree
    cudaMemcpyAsync(out, in, static_cast<size_t>(shape.num_bytes()), cudaMemcpyDeviceToDevice, stream);
    return last_error();
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

const char* merge_shards_cuda(const void* in, void* out, const ShardShape& shape, void* stream) {
  return change_layout<Change::kMerge>(in, out, shape, stream);
}

const char* split_shards_cuda(const void* in, void* out, const ShardShape& shape, void* stream) {
  return change_layout<Change::kSplit>(in, out, shape, stream);
}

bool has_cuda_kernels() { return true; }

}  // namespace funcol::kernels
