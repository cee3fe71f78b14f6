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

}  // namespace funcol
