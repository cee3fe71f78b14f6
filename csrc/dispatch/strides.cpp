#include "dispatch/strides.h"

#include <algorithm>
#include <numeric>

#include "layout/tensor_meta.h"

namespace funcol::python {
namespace {

// Multiplies strides that are at least the stride of a cut dim by the number of shards, as PyTorch does.
std::vector<int64_t> spread_stride(at::IntArrayRef stride, const std::vector<Placement>& placements,
                                   const Mesh& mesh) {
  auto full = stride.vec();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard()) {
      const auto of_dim = full[placements[axis].dim];
      for (size_t dim = 0; dim < full.size(); ++dim) {
        if (static_cast<int64_t>(dim) != placements[axis].dim && full[dim] >= of_dim) {
          full[dim] *= mesh.sizes[axis];
        }
      }
    }
  }
  return full;
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

std::vector<int64_t> full_strides(const at::Tensor& local, const std::vector<Placement>& placements,
                                  const std::vector<int64_t>& shape, const Mesh& mesh) {
  const auto stride = local.strides();
  if (!local.is_contiguous() && !local.is_non_overlapping_and_dense()) {
    return spread_stride(stride, placements, mesh);
  }
  auto full = local.is_contiguous() ? contiguous_strides(shape) : dense_strides(shape, stride);
  if (std::ranges::find(shape, 1) != shape.end()) {
    const auto spread = spread_stride(stride, placements, mesh);
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      full[dim] = shape[dim] == 1 ? spread[dim] : full[dim];
    }
  }
  return full;
}

}  // namespace funcol::python
