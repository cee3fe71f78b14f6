// Copies the boxes of many tensors into flat buffers and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/box_rows.h"
#include "ops/backend_tensor.h"
#include "transfer/box_copy.h"

namespace funcol {

// Copies of boxes between contiguous tensors. On CUDA, boxes wait until kernels::kMaxBoxes of them fill a
// launch, or until flush(); elsewhere, and without CUDA kernels, add() copies at once. All tensors are on one
// device, copies run on its current stream, and no box is read where another is written.
class BoxCopies {
 public:
  static at::Tensor contiguous(const at::Tensor& tensor) { return contiguous_input(tensor); }

  // Copies like BoxCopy::run(), or adds the copy to the waiting ones.
  void add(const BoxCopy& box, const at::Tensor& from, int64_t from_begin, const at::Tensor& to,
           int64_t to_begin);

  // Starts the waiting copies. The targets must not be used before.
  void flush();

 private:
  std::array<std::vector<kernels::RowBox>, 5>
      waiting_;                   // by the width of their vectors: 1, 2, 4, 8, 16 bytes
  std::vector<at::Tensor> kept_;  // the tensors of the waiting boxes
};

// Copies by operators that every layer of PyTorch sees, each at once.
struct OperatorCopies {
  static at::Tensor contiguous(const at::Tensor& tensor) { return tensor.contiguous(); }
  static void add(const BoxCopy& box, const at::Tensor& from, int64_t from_begin, const at::Tensor& to,
                  int64_t to_begin) {
    box.run_by_operators(from, from_begin, to, to_begin);
  }
  static void flush() {}
};

}  // namespace funcol
