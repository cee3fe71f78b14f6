// Which bytes of device memory a tensor covers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu::aten {

// Tensors of more separate pieces than this are not watched.
constexpr int64_t kMaxPieces = 4096;

// Adds the bytes of a CUDA tensor's elements, one range for each piece without holes; nothing for other
// tensors and for tensors without elements. A tensor of more than kMaxPieces pieces adds nothing, so no race
// on it is found.
//
//   float, sizes (3, 4), strides (4, 1)   one range of 48 bytes
//   float, sizes (3, 2), strides (4, 1)   three ranges of 8 bytes, 16 bytes apart
//   float, sizes (3, 4), strides (0, 1)   one range of 16 bytes
void add_ranges(const at::Tensor& tensor, std::vector<Range>& ranges);

}  // namespace simulated_gpu::aten
