// Tensors that are moved at once and taken one by one.
//
// Until a tensor is taken, its data is only in a buffer. So a bucket holds its tensors once, and besides them
// the tensor taken last. Worked case, ten weights gathered over 4 ranks: one all_gather into a buffer of
// their size; each take() copies one weight out of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "transfer/bundle.h"

namespace funcol {

// A bucket of items, each of which ends in an all_gather, an all_reduce, or the exchange to one rank.
class Bucket {
 public:
  // Takes items that Execution::check() has accepted.
  explicit Bucket(std::vector<TransferItem> items)
      : items_(std::move(items)), moving_of_(items_.size(), -1) {}

  // Starts one collective for each step and kind of move, and waits for those before the last. Precondition:
  // no layer of PyTorch observes operations, and no gradient is recorded.
  void start();

  // Returns the next item's tensor: in memory of its own, or the item's local tensor if it takes no steps.
  // Waits for the collective that brings it. Returns an undefined tensor after the last one.
  at::Tensor next();

 private:
  struct Moving {
    Bundle bundle;
    FlatResults results;
    size_t num_returned = 0;
  };

  std::vector<TransferItem> items_;
  std::vector<Moving> moving_;
  std::vector<int64_t> moving_of_;  // by item; -1: it takes no steps
  size_t num_returned_ = 0;
};

}  // namespace funcol
