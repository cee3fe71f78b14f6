// Fills memory with random numbers of a distribution, by the positions of the elements (random_values.h).
//
// A caller has the elements of a shard in runs, whose positions in the full tensor follow each other, or in
// boxes of several dims, and calls a kernel once for each. So every rank computes for a position what any
// other rank computes.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/random_values.h"

namespace funcol::kernels {

// Writes the elements at the positions [first, first + count) to `out`. T is float, double, int64_t or
// bool. int64_t and bool elements may be integers, geometric or Bernoulli numbers.
template <typename T>
void fill_random(T* out, const RandomNumbers& numbers, const RandomKey& key, int64_t first, int64_t count);

// Elements of a shard whose positions have a stride for each dim, in the shard and in the full tensor.
struct RandomBox {
  static constexpr int kMaxDims = 16;

  struct Dim {
    int64_t size = 1;
    int64_t local_stride = 0;
    int64_t full_stride = 0;
  };

  int64_t local = 0;  // position of the first element in the shard
  int64_t full = 0;   // and in the full tensor
  int num_dims = 0;
  Dim dims[kMaxDims] = {};

  FUNCOL_HOST_DEVICE int64_t numel() const {
    int64_t numel = 1;
    for (int i = 0; i < num_dims; ++i) {
      numel *= dims[i].size;
    }
    return numel;
  }
};

}  // namespace funcol::kernels
