// Copies of boxes of rows, vector by vector: the body of the CUDA kernel.
//
// Host compilers take this header, too, so that the arithmetic of indexes is tested without a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/box_rows.h"
#include "kernels/cuda/move_vectors.h"
#include "kernels/host_device.h"

namespace funcol::kernels {

// The copy of all vectors of some boxes, each by a call with its index in [0, count()), in any sequence. All
// boxes consist of such vectors. A 32-bit Index counts fewer than 2^31 vectors.
template <typename VectorType, typename IndexType>
struct MoveBoxes {
  using Vector = VectorType;
  using Index = IndexType;

  // A box, counted in vectors; strides are bytes.
  struct Box {
    const char* from;
    char* to;
    int64_t from_strides[2];
    int64_t to_strides[2];
    Index end;  // the vectors of this box and of those before it
    Index num_rows;
    Index row_vectors;
  };

  Box boxes[kMaxBoxes];
  uint32_t num_boxes;

  MoveBoxes(const RowBox* rows, size_t num) : boxes(), num_boxes(static_cast<uint32_t>(num)) {
    Index end = 0;
    for (size_t i = 0; i < num; ++i) {
      const RowBox& box = rows[i];
      end += static_cast<Index>(box.num_bytes() / int64_t{sizeof(Vector)});
      boxes[i] = {static_cast<const char*>(box.from),
                  static_cast<char*>(box.to),
                  {box.from_strides[0], box.from_strides[1]},
                  {box.to_strides[0], box.to_strides[1]},
                  end,
                  static_cast<Index>(box.num_rows[1]),
                  static_cast<Index>(box.row_bytes / int64_t{sizeof(Vector)})};
    }
  }

  FUNCOL_HOST_DEVICE Index count() const { return boxes[num_boxes - 1].end; }

  FUNCOL_HOST_DEVICE void operator()(Index index) const {
    // The first box that ends after the index.
    uint32_t low = 0;
    for (uint32_t high = num_boxes - 1; low < high;) {
      const uint32_t middle = (low + high) / 2;
      if (boxes[middle].end > index) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const Box& box = boxes[low];
    const Index in_box = low == 0 ? index : index - boxes[low - 1].end;
    const Index row_of_all = in_box / box.row_vectors;
    const Index within = in_box - row_of_all * box.row_vectors;
    const Index plane = row_of_all / box.num_rows;
    const Index row = row_of_all - plane * box.num_rows;
    const auto* const from = box.from + plane * box.from_strides[0] + row * box.from_strides[1];
    auto* const to = box.to + plane * box.to_strides[0] + row * box.to_strides[1];
    reinterpret_cast<Vector*>(to)[within] = load(reinterpret_cast<const Vector*>(from) + within);
  }
};

}  // namespace funcol::kernels
