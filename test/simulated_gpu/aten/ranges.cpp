#include "ranges.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace simulated_gpu::aten {
namespace {

// In bytes.
struct Dimension {
  int64_t stride;
  int64_t size;  // a count
};

// The dimensions in which elements lie apart, the smallest stride first.
std::vector<Dimension> moving_dimensions(const at::Tensor& tensor) {
  const auto item_size = static_cast<int64_t>(tensor.itemsize());
  std::vector<Dimension> dimensions;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) {
      dimensions.push_back({tensor.stride(d) * item_size, tensor.size(d)});
    }
  }
  std::ranges::sort(dimensions,
                    [](const Dimension& one, const Dimension& other) { return one.stride < other.stride; });
  return dimensions;
}

}  // namespace

void add_ranges(const at::Tensor& tensor, std::vector<Range>& ranges) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != at::kStrided || tensor.numel() == 0) {
    return;
  }
  const std::vector<Dimension> dimensions = moving_dimensions(tensor);
  auto piece = static_cast<int64_t>(tensor.itemsize());
  auto dimension = dimensions.begin();
  for (; dimension != dimensions.end() && dimension->stride <= piece; ++dimension) {
    piece += (dimension->size - 1) * dimension->stride;  // touches, or overlaps, the piece before
  }

  std::vector<int64_t> offsets = {0};
  for (; dimension != dimensions.end(); ++dimension) {
    const size_t inner = offsets.size();
    if (static_cast<int64_t>(inner) * dimension->size > kMaxPieces) {
      return;
    }
    for (int64_t i = 1; i < dimension->size; ++i) {
      for (size_t o = 0; o < inner; ++o) {
        offsets.push_back(offsets[o] + i * dimension->stride);
      }
    }
  }
  const auto* const begin = static_cast<const std::byte*>(tensor.unsafeGetTensorImpl()->data());
  for (const int64_t offset : offsets) {
    ranges.push_back({begin + offset, static_cast<size_t>(piece)});
  }
}

}  // namespace simulated_gpu::aten
