// Strides of tensors that have the memory layout of other tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "layout/mesh.h"
#include "layout/placement.h"

namespace funcol::python {

// Returns the strides of a tensor of `shape` without gaps, its dims in the order of the strides `like`.
std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape, at::IntArrayRef like);

// Returns PyTorch's strides of a full tensor of `shape` whose part on each rank has the memory layout of
// `local`. Dims of size 1 get the strides that PyTorch gives them.
//
// Worked case: a transposed local (3, 4) with stride (1, 3), S(0) on 2 ranks, shape (5, 4): (1, 5).
std::vector<int64_t> full_strides(const at::Tensor& local, const std::vector<Placement>& placements,
                                  const std::vector<int64_t>& shape, const Mesh& mesh);

}  // namespace funcol::python
