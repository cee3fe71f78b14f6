// Strides of a whole tensor whose parts are known, as PyTorch has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "layout/mesh.h"
#include "layout/placement.h"

namespace funcol::python {

// How a tensor of `shape` lies in memory that lies as `local` does on each rank. Dims of size 1 have the
// strides that PyTorch gives them.
//
// Worked case: a transposed local (3, 4) with stride (1, 3), S(0) on 2 ranks, shape (5, 4): (1, 5).
std::vector<int64_t> stride_of_whole(const at::Tensor& local, const std::vector<Placement>& placements,
                                     const std::vector<int64_t>& shape, const Mesh& mesh);

}  // namespace funcol::python
