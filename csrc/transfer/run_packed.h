// Runs the steps of several tensors as one collective on a flat buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "async/started_collective.h"
#include "transfer/op_names.h"
#include "transfer/packed_exchange.h"

namespace funcol {

using PackedExchanges = std::vector<std::shared_ptr<const PackedExchange>>;

// The results of the one collective that does all of `steps`, of one signature, each on its tensor. Each
// result is made when it is asked for, in the order of the steps: until then its data is in the received
// buffer alone.
class FlatResults {
 public:
  // Starts the collective. No step keeps elements past the buffers.
  FlatResults(PackedExchanges steps, const std::vector<at::Tensor>& tensors);

  // Waits for the collective if nobody has. A tensor of its own; the received buffer itself if that is the
  // sole result as it lies. Undefined after the last one.
  at::Tensor next();

 private:
  PackedExchanges steps_;
  size_t num_made_ = 0;
  std::vector<at::Tensor> received_;  // pending: the buffer, or a tensor for each step of an all_reduce
  std::vector<int64_t> begins_;       // by rank, of the next step's blocks
};

// Starts the one collective that does all of `steps`, of one signature, each on its tensor; none if no rank
// sends. The outputs are new tensors, in the order of the steps; the epilogue fills them. `scratch`, if it is
// given, is the buffer to send from, replaced if it is too small: nobody else has it. `op` is named in
// errors.
StartedCollective start_together(PackedExchanges steps, std::vector<at::Tensor> tensors,
                                 at::Tensor* scratch = nullptr, const char* op = kRedistributeMany);

// The outputs of start_together(), by operators that every layer of PyTorch sees and autograd records. The
// group has the ranks of the steps alone.
std::vector<at::Tensor> run_together(const PackedExchanges& steps, const std::vector<at::Tensor>& tensors);

}  // namespace funcol
