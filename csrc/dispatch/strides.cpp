#include "dispatch/strides.h"

#include <algorithm>
#include <numeric>

namespace funcol::python {
namespace {

std::vector<int64_t> dense_stride(const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  std::vector<int64_t> stride(shape.size());
  int64_t step = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    stride[*dim] = step;
    step *= std::max<int64_t>(shape[*dim], 1);
  }
  return stride;
}

// As PyTorch does: strides that are at least the stride of a cut dim are multiplied by the number of shards.
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

std::vector<int64_t> stride_of_whole(const at::Tensor& local, const std::vector<Placement>& placements,
                                     const std::vector<int64_t>& shape, const Mesh& mesh) {
  const auto stride = local.strides();
  if (!local.is_contiguous() && !local.is_non_overlapping_and_dense()) {
    return spread_stride(stride, placements, mesh);
  }
  std::vector<int64_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (!local.is_contiguous()) {
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return stride[a] > stride[b]; });
  }
  auto whole = dense_stride(shape, order);
  if (std::ranges::find(shape, 1) != shape.end()) {
    const auto spread = spread_stride(stride, placements, mesh);
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      whole[dim] = shape[dim] == 1 ? spread[dim] : whole[dim];
    }
  }
  return whole;
}

}  // namespace funcol::python
