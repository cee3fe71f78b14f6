// Runs the plans of many tensors together: one collective for a step that several of them share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "transfer/bundle.h"

namespace funcol {

// Returns the results of program->before->run(local, async_op, masks) for each item, in their order. All
// items are on one mesh, in the same order on all of its ranks. Everything is checked before anything is
// sent.
//
// Items whose plans have the same steps, and whose tensors have one dtype and device, go together: at each
// step they are packed into one buffer for one collective, as many as have peaks of at most `together_bytes`
// in sum. Collectives of different bundles run at the same time. A sum of floating-point numbers may differ
// in the last bits from that of each tensor alone: a backend's order of additions depends on the place in the
// buffer.
//
// Items with masks run one after the other. If a layer of PyTorch observes operations, or a tensor needs a
// gradient, the same collectives run by operators that layers see. Raises NotImplementedError if an item then
// has an exchange.
std::vector<at::Tensor> run_batch(const std::vector<TransferItem>& items, bool async_op,
                                  int64_t together_bytes);

}  // namespace funcol
