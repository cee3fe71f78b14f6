// Runs the plans of many tensors together, with a collective for each step that several of them have alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "redistribute/executor.h"

namespace funcol {

struct ManyItem {
  std::shared_ptr<const Execution> execution;
  at::Tensor local;
  MaskHooks masks;
};

// What execution->run(local, async_op, masks) gives for each item, in their order. All of them are on one
// mesh, and in the same order on all of its ranks.
//
// Items whose plans have the same steps, and whose tensors have one dtype and device, go together: at each
// step they are packed into one buffer for one collective, as many as have peaks of `together_bytes` in sum.
// Collectives of different such groups run at the same time. What a reduction of floating-point numbers gives
// may differ in the last bits from that of each tensor alone, as the order in which a backend adds up depends
// on where in the buffer a number lies.
//
// One after the other run tensors that a layer of PyTorch watches or that need a gradient, and those with
// masks.
//
// Everything is checked before anything is sent.
std::vector<at::Tensor> run_many(const std::vector<ManyItem>& items, bool async_op, int64_t together_bytes);

}  // namespace funcol
