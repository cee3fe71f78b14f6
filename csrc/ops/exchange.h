// The exchange of rows between all ranks that all_to_all, permute, scatter and gather are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "async/started_collective.h"
#include "comm/group_ptr.h"

namespace funcol {

// input_splits[r] rows of `source` go to rank r, output_splits[r] rows of `out` come from it. Both tensors
// contiguous, of one dtype, and of the same sizes but for dim 0.
c10::intrusive_ptr<c10d::Work> exchange(const at::Tensor& source, const at::Tensor& out,
                                        std::vector<int64_t> output_splits, std::vector<int64_t> input_splits,
                                        c10d::ProcessGroup& group);

// An exchange of the elements of a flat tensor in which only ranks that have elements for each other take
// part: by sends and receives between pairs, which no backend has to set up for the whole group. Its output
// is the received elements, in the order of the senders.
StartedCollective start_exchange_in_pairs(const at::Tensor& input, at::IntArrayRef output_splits,
                                          at::IntArrayRef input_splits, const GroupPtr& group);

// Splits of an exchange in which this rank has to do with rank `root` alone: `size` there, 0 elsewhere.
template <typename Size>
std::vector<Size> splits_of_root(int64_t root, const Size& size, const c10d::ProcessGroup& group) {
  std::vector<Size> splits(group.getSize(), Size(0));
  splits[root] = size;
  return splits;
}

}  // namespace funcol
