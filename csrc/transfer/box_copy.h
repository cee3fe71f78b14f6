// Copies a box of one tensor into another, or into a flat buffer that carries boxes of several tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/box_rows.h"
#include "transfer/exchange_plan.h"

namespace funcol {

// A run of neighboring positions along a dim: where it is read and where it is written.
struct CopyRun {
  int64_t from = 0;
  int64_t to = 0;
  int64_t size = 0;

  friend bool operator==(const CopyRun&, const CopyRun&) = default;
};

// A copy of the product of the runs of all dims from one contiguous array to another.
//
// Worked case, the second of two equal column blocks of a (2, 6) tensor into a (2, 3) block: runs {0, 0, 2}
// and {3, 0, 3}; elements 3 4 5 9 10 11 become 0 to 5.
class BoxCopy {
 public:
  BoxCopy(std::vector<std::vector<CopyRun>> runs, const std::vector<int64_t>& from_shape,
          const std::vector<int64_t>& to_shape);

  int64_t numel() const { return numel_; }

  // Returns the target position of the copy if it is one run from position 0 of its source, else -1.
  int64_t place() const;

  // Copies between contiguous tensors of the same dtype and device. The arrays begin at their elements
  // `from_begin` and `to_begin`. On CUDA the copy runs on the current stream.
  void run(const at::Tensor& from, int64_t from_begin, const at::Tensor& to, int64_t to_begin) const;

  // Returns true if rows in at most two outer dims make up the copy, as for_each_rows() needs.
  bool has_rows() const { return runs_.size() <= 3; }

  // Calls `take` with the rows of each product of a run per dim. The arrays begin at `from` and `to`; an
  // element has `itemsize` bytes.
  void for_each_rows(const char* from, char* to, int64_t itemsize,
                     const std::function<void(const kernels::RowBox&)>& take) const;

  // Copies like run(), by operators that every layer of PyTorch sees.
  void run_by_operators(const at::Tensor& from, int64_t from_begin, const at::Tensor& to,
                        int64_t to_begin) const;

 private:
  std::vector<std::vector<CopyRun>>
      runs_;  // by dim; a dim that is full on both sides is merged into the one before
  std::vector<int64_t> from_strides_;
  std::vector<int64_t> to_strides_;
  int64_t numel_ = 1;
};

// Returns a run over all of each dim.
std::vector<std::vector<CopyRun>> full_runs(const std::vector<int64_t>& shape);

// Returns the runs from a full dim to a shard of these positions, in their order.
std::vector<CopyRun> runs_to_shard(const Intervals& positions);

// Returns the copy from a tensor of `shape` to its selection.
BoxCopy selection_copy(const Selection& selection, const std::vector<int64_t>& shape);

}  // namespace funcol
