// Runs the plans of many tensors from one mesh to another, a batch at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "transfer/transfer_program.h"

namespace funcol {

// Returns the new local tensors: in memory of their own, pending only with `async_op`. All ranks of both
// meshes must call it with the items in the same order.
//
// Items of one dtype travel together, as many as have peaks of at most `together_bytes` in sum. One batch is
// packed and sent while the previous one arrives, so that two batches are in memory, besides the tensors
// before and after. With `async_op` all batches are started, and kept until their tensors are used.
std::vector<at::Tensor> run_mesh_changes(std::vector<TransferItem> items, bool async_op,
                                         int64_t together_bytes);

}  // namespace funcol
