// Rows from every rank to every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/process_group.h"

namespace funcol {

// input_splits[r] rows of `source` go to rank r, output_splits[r] rows of `out` come from it. Both tensors
// contiguous, of the same dtype and the same sizes but for dim 0.
c10::intrusive_ptr<c10d::Work> exchange(const at::Tensor& source, const at::Tensor& out,
                                        std::vector<int64_t> output_splits, std::vector<int64_t> input_splits,
                                        c10d::ProcessGroup& group);

// What this rank does in a permutation that sends the tensor of rank m to rank destinations[m], in whole
// tensors: 1 for each rank that it sends to or gets from, 0 for the others. `destinations` is checked.
struct PermuteSplits {
  PermuteSplits(at::IntArrayRef destinations, const c10d::ProcessGroup& group);

  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  int64_t num_sent;
  int64_t num_received;
};

}  // namespace funcol
