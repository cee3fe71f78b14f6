// Copies boxes of rows between arrays in device memory, many boxes in one launch.
//
// Packing a batch of tensors takes a copy for each tensor and rank. A launch for each costs the host more
// than most of these copies cost the device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace funcol::kernels {

// A copy of num_rows[0] planes of num_rows[1] rows. Row r of plane p has row_bytes bytes and begins at
// from + p * from_strides[0] + r * from_strides[1], and likewise at `to`. Strides are bytes; those of a
// single plane or row do not count. The rows are not empty, and the memory at `to` does not overlap any that
// is read.
//
// Worked case, columns 2 and 3 of a contiguous (5, 4) tensor of float32 into a contiguous (5, 2) one:
// row_bytes = 8, num_rows = {1, 5}, from = the tensor + 8, from_strides = {0, 16}, to_strides = {0, 8}.
struct RowBox {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t row_bytes = 0;
  std::array<int64_t, 2> num_rows = {1, 1};
  std::array<int64_t, 2> from_strides = {0, 0};
  std::array<int64_t, 2> to_strides = {0, 0};

  int64_t num_bytes() const { return num_rows[0] * num_rows[1] * row_bytes; }
};

// The maximum number of boxes of a launch, whose parameters take at most 4 KiB.
constexpr size_t kMaxBoxes = 40;

// Returns the bytes of the widest vectors, 16, 8, 4, 2 or 1, in which all rows of `box` can be read and
// written. Inline, because libfuncol_cuda.so links nothing of funcol.
inline int64_t vector_bytes(const RowBox& box) {
  uint64_t bits = reinterpret_cast<uintptr_t>(box.from) | reinterpret_cast<uintptr_t>(box.to) |
                  static_cast<uint64_t>(box.row_bytes) | 16;
  for (size_t dim = 0; dim < box.num_rows.size(); ++dim) {
    if (box.num_rows[dim] > 1) {
      bits |= static_cast<uint64_t>(box.from_strides[dim]) | static_cast<uint64_t>(box.to_strides[dim]);
    }
  }
  return static_cast<int64_t>(bits & (~bits + 1));  // the lowest bit
}

}  // namespace funcol::kernels
