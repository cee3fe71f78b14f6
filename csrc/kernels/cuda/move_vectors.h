// Copies between tensor order and rank-major order, vector by vector: the bodies of the CUDA kernels.
//
// Host compilers take this header, too, so that the arithmetic of indexes is tested without a GPU.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/rank_major.h"

namespace funcol::kernels {

// Division by a divisor that is fixed at launch.
template <typename Index>
struct Divider {
  Index divisor;

  explicit Divider(Index d) : divisor(d) {}

  FUNCOL_HOST_DEVICE Index quotient(Index n) const { return n / divisor; }
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

  FUNCOL_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    const auto high = static_cast<uint32_t>((uint64_t{n} * magic) >> 32);
    return (high + n) >> shift;
  }
};

// Reads memory that no thread writes meanwhile, on the device through the read-only cache.
template <typename Vector>
FUNCOL_HOST_DEVICE Vector load(const Vector* from) {
#ifdef __CUDA_ARCH__
  return __ldg(from);
#else
  return *from;
#endif
}

// The copy of all vectors of a change, each by a call with its index in tensor order: in [0, num_vectors), in
// any sequence. `in`, `out` and the rows are aligned to a Vector, and rows are not empty. A 32-bit Index
// counts fewer than 2^31 vectors.
template <Change kChange, typename VectorType, typename IndexType>
struct MoveVectors {
  using Vector = VectorType;
  using Index = IndexType;

  const Vector* in;
  Vector* out;
  Index num_vectors;
  Index outer;
  Divider<Index> num_ranks;
  Divider<Index> row_vectors;

  MoveVectors(const void* from, void* to, const ShardShape& shape)
      : in(static_cast<const Vector*>(from)),
        out(static_cast<Vector*>(to)),
        num_vectors(static_cast<Index>(shape.num_bytes() / int64_t{sizeof(Vector)})),
        outer(static_cast<Index>(shape.outer)),
        num_ranks(static_cast<Index>(shape.num_ranks)),
        row_vectors(static_cast<Index>(shape.row_bytes / int64_t{sizeof(Vector)})) {}

  FUNCOL_HOST_DEVICE Index count() const { return num_vectors; }

  FUNCOL_HOST_DEVICE void operator()(Index in_tensor) const {
    const Index row = row_vectors.quotient(in_tensor);
    const Index within = in_tensor - row * row_vectors.divisor;
    const Index o = num_ranks.quotient(row);
    const Index rank = row - o * num_ranks.divisor;
    const Index by_rank = (rank * outer + o) * row_vectors.divisor + within;
    if constexpr (kChange == Change::kMerge) {
      out[in_tensor] = load(in + by_rank);
    } else {
      out[by_rank] = load(in + in_tensor);
    }
  }
};

}  // namespace funcol::kernels
