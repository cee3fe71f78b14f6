// Random numbers for the elements of a box, a few at a time: the body of the CUDA kernel.
//
// Host compilers take this header, too, so that the arithmetic of indexes is tested without a GPU.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/random.h"

namespace funcol::kernels {

// Each call writes the kNum elements of `box` from number kNum * index on, the last dim counted first: mostly
// the elements of one or two of Philox's blocks.
template <typename T>
struct FillRandom {
  using Index = int64_t;
  static constexpr int64_t kNum = 4;

  T* out;
  const int64_t* seed;
  RandomNumbers numbers;
  RandomBox box;
  int64_t numel;

  FillRandom(T* to, const RandomNumbers& drawn, const int64_t* key, const RandomBox& elements)
      : out(to), seed(key), numbers(drawn), box(elements), numel(elements.numel()) {}

  FUNCOL_HOST_DEVICE Index count() const { return (numel + kNum - 1) / kNum; }

  FUNCOL_HOST_DEVICE void operator()(Index index) const {
    visit_values<T>(numbers, [this, index](const auto& values) { write(values, index * kNum); });
  }

 private:
  template <typename Values>
  FUNCOL_HOST_DEVICE void write(const Values& values, int64_t first) const {
    const RandomKey key{static_cast<uint64_t>(*seed), 0};
    const int64_t end = first + kNum < numel ? first + kNum : numel;
    T block[Values::kNum];
    int64_t held = -1;  // the number of the block in `block`
    for (int64_t i = first; i < end; ++i) {
      int64_t local = box.local;
      int64_t full = box.full;
      int64_t rest = i;
      for (int dim = box.num_dims - 1; dim > 0; --dim) {
        const int64_t before = rest / box.dims[dim].size;
        const int64_t at = rest - before * box.dims[dim].size;
        local += at * box.dims[dim].local_stride;
        full += at * box.dims[dim].full_stride;
        rest = before;
      }
      local += rest * box.dims[0].local_stride;
      full += rest * box.dims[0].full_stride;
      if (full / Values::kNum != held) {
        held = full / Values::kNum;
        values(random_bits(key, static_cast<uint64_t>(held)), block);
      }
      out[local] = block[full % Values::kNum];
    }
  }
};

}  // namespace funcol::kernels
