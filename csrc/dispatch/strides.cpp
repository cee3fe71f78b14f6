#include "dispatch/strides.h"

#include <algorithm>
#include <numeric>

#include "layout/tensor_meta.h"

namespace funcol::python {
namespace {

// Multiplies strides that are at least the stride of a cut dim by the number of shards, as PyTorch does.
std::vector<int64_t> spread_stride(at::IntArrayRef stride, const std::vector<Placement>& placements,
                                   const Mesh& mesh) {
  auto whole = stride.vec();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard()) {
      const auto of_dim = whole[placements[axis].dim];
      for (size_t dim = 0; dim < whole.size(); ++dim) {
        if (static_cast<int64_t>(dim) != placements[axis].dim && whole[dim] >= of_dim) {
          whole[dim] *= mesh.sizes[axis];
        }
      }
    }
  }
  return whole;
}

}  // namespace

std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape, at::IntArrayRef like) {
  std::vector<size_t> dims(shape.size());
  std::iota(dims.rbegin(), dims.rend(), 0);
  std::ranges::stable_sort(dims, {}, [&](size_t dim) { return like[dim]; });
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (const size_t dim : dims) {
    strides[dim] = step;
    step *= std::max<int64_t>(shape[dim], 1);
  }
  return strides;
}

std::vector<int64_t> stride_of_whole(const at::Tensor& local, const std::vector<Placement>& placements,
                                     const std::vector<int64_t>& shape, const Mesh& mesh) {
  const auto stride = local.strides();
  if (!local.is_contiguous() && !local.is_non_overlapping_and_dense()) {
    return spread_stride(stride, placements, mesh);
  }
  auto whole = local.is_contiguous() ? contiguous_strides(shape) : dense_strides(shape, stride);
  if (std::ranges::find(shape, 1) != shape.end()) {
    const auto spread = spread_stride(stride, placements, mesh);
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      whole[dim] = shape[dim] == 1 ? spread[dim] : whole[dim];
    }
  }
  return whole;
}

}  // namespace funcol::python
