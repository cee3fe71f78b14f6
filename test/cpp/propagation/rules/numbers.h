// Tensors of numbers, and the parts of them that ranks hold.
#pragma once

#include <vector>

#include "layout/shards.h"
#include "layout/tensor_meta.h"

namespace funcol::test {

// A dense tensor of numbers, the last dim counting up first.
struct Numbers {
  std::vector<int64_t> shape;
  std::vector<double> values;

  friend bool operator==(const Numbers&, const Numbers&) = default;
};

// The index of an element on every dim.
inline std::vector<int64_t> index_of(int64_t element, const std::vector<int64_t>& shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t dim = shape.size(); dim-- > 0;) {
    index[dim] = element % shape[dim];
    element /= shape[dim];
  }
  return index;
}

inline int64_t element_at(const std::vector<int64_t>& index, const std::vector<int64_t>& shape) {
  int64_t element = 0;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    element = element * shape[dim] + index[dim];
  }
  return element;
}

inline Numbers local_part(const Numbers& whole, const Layout& layout, const Mesh& mesh,
                          const Coordinate& coordinate) {
  std::vector<std::vector<int64_t>> held(whole.shape.size());
  Numbers part;
  for (size_t dim = 0; dim < whole.shape.size(); ++dim) {
    for (const auto& interval :
         local_indices(layout, mesh, static_cast<int64_t>(dim), whole.shape[dim], coordinate)) {
      for (int64_t i = interval.begin; i < interval.end(); ++i) {
        held[dim].push_back(i);
      }
    }
    part.shape.push_back(static_cast<int64_t>(held[dim].size()));
  }
  for (int64_t element = 0; element < num_elements(part.shape); ++element) {
    auto index = index_of(element, part.shape);
    for (size_t dim = 0; dim < index.size(); ++dim) {
      index[dim] = held[dim][index[dim]];
    }
    part.values.push_back(whole.values[element_at(index, whole.shape)]);
  }
  return part;
}

}  // namespace funcol::test
