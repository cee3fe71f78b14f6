// Choices from a fuzzer's input. An input that ends early goes on with zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "layout/layout.h"

namespace funcol::test {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : next_(data), end_(data + size) {}

  // A number from 0 to end - 1; `end` is at most 256.
  int64_t below(int64_t end) { return byte() % end; }
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  bool coin() { return below(2) == 1; }

  template <typename T>
  T one_of(const std::vector<T>& choices) {
    return choices[below(static_cast<int64_t>(choices.size()))];
  }

  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[below(static_cast<int64_t>(i))]);
    }
  }

  // All that is left, as text.
  std::string rest() {
    std::string text(next_, end_);
    next_ = end_;
    return text;
  }

 private:
  uint8_t byte() { return next_ == end_ ? uint8_t{0} : *next_++; }

  const uint8_t* next_;
  const uint8_t* end_;
};

// A mesh of 1 to `max_axes` axes with at most `max_ranks` ranks, some sets of whose axes have groups
// together.
inline Mesh mesh_from(Bytes& bytes, int64_t max_axes, int64_t max_ranks) {
  Mesh mesh;
  const int64_t num_axes = bytes.between(1, max_axes);
  for (int64_t axis = 0; axis < num_axes; ++axis) {
    const auto size = bytes.one_of<int64_t>({2, 1, 2, 3, 4, 5});
    mesh.sizes.push_back(mesh.num_ranks() * size <= max_ranks ? size : 1);
  }
  for (AxisSet axes = 1; axes < AxisSet{1} << num_axes; ++axes) {
    if (funcol::num_axes(axes) > 1 && bytes.below(4) == 1) {
      mesh.merged.push_back(axes);
    }
  }
  return mesh;
}

// The sizes of `num_dims` dims with at most `max_elements` elements.
inline std::vector<int64_t> shape_from(Bytes& bytes, int64_t num_dims, int64_t max_elements) {
  std::vector<int64_t> shape;
  int64_t num_elements = 1;
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    const auto size = bytes.one_of<int64_t>({4, 2, 3, 1, 5, 6, 7, 8, 9, 12, 16, 0});
    shape.push_back(num_elements * size <= max_elements ? size : 2);
    num_elements *= shape.back();
  }
  return shape;
}

// The order of the cuts of each dim, shuffled.
inline ShardOrder order_from(Bytes& bytes, const std::vector<Placement>& placements) {
  ShardOrder order = default_shard_order(placements);
  for (auto& cuts : order) {
    bytes.shuffle(cuts);
  }
  return order;
}

}  // namespace funcol::test
