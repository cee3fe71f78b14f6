// A slow reference for shards: chunks explicit lists of indices as PyTorch chunks tensors.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "layout/layout.h"
#include "layout/shards.h"

namespace funcol::test {

using Indices = std::vector<int64_t>;

inline Indices listed(const Intervals& intervals) {
  Indices indices;
  for (const auto& interval : intervals) {
    for (int64_t index = interval.begin; index < interval.end(); ++index) {
      indices.push_back(index);
    }
  }
  return indices;
}

inline Indices counted(int64_t size) { return listed({{0, size}}); }

// torch.chunk, with empty chunks in place of the ones that it leaves out.
inline std::vector<Indices> chunk(const Indices& whole, int64_t num_chunks) {
  std::vector<Indices> chunks(num_chunks);
  const auto size = static_cast<int64_t>(whole.size());
  const int64_t length = size / num_chunks + (size % num_chunks != 0 ? 1 : 0);
  for (int64_t i = 0; i < size; ++i) {
    chunks.at(i / length).push_back(whole[i]);
  }
  return chunks;
}

// torch.distributed.tensor's _StridedShard._split_tensor: chunks of every piece, joined.
inline std::vector<Indices> strided_chunk(const Indices& whole, int64_t num_ranks, int64_t split_factor) {
  std::vector<Indices> shards(num_ranks);
  for (const auto& piece : chunk(whole, split_factor)) {
    const auto chunks = chunk(piece, num_ranks);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      shards[rank].insert(shards[rank].end(), chunks[rank].begin(), chunks[rank].end());
    }
  }
  return shards;
}

inline Indices naive_local_indices(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size,
                                   const Coordinate& coordinate) {
  Indices held = counted(size);
  for (const int64_t axis : layout.axes_of(dim)) {
    held = strided_chunk(held, mesh.sizes[axis], layout.placements[axis].split_factor)[coordinate[axis]];
  }
  return held;
}

// The numbers of the elements that have these indices of each dim, the last dim counting up first.
inline Indices elements_at(const std::vector<Indices>& indices, const std::vector<int64_t>& shape) {
  Indices elements{0};
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    Indices longer;
    for (const int64_t element : elements) {
      for (const int64_t index : indices[dim]) {
        longer.push_back(element * shape[dim] + index);
      }
    }
    elements = std::move(longer);
  }
  return elements;
}

// The coordinates of all ranks. The last axis counts up first.
inline std::vector<Coordinate> coordinates(const Mesh& mesh) {
  std::vector<Coordinate> all;
  for (int64_t rank = 0; rank < mesh.num_ranks(); ++rank) {
    Coordinate coordinate(mesh.sizes.size());
    int64_t rest = rank;
    for (auto axis = static_cast<int64_t>(mesh.sizes.size()) - 1; axis >= 0; --axis) {
      coordinate[axis] = rest % mesh.sizes[axis];
      rest /= mesh.sizes[axis];
    }
    all.push_back(coordinate);
  }
  return all;
}

// "2x3", for names of test cases.
inline std::string joined(const std::vector<int64_t>& numbers, const std::string& between = "x") {
  std::string text;
  for (const int64_t number : numbers) {
    text += (text.empty() ? "" : between) + std::to_string(number);
  }
  return text.empty() ? "none" : text;
}

}  // namespace funcol::test
