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
// result is made by next(), in the order of the steps: until then its data is only in the received buffer.
class FlatResults {
 public:
  // Starts the collective. Precondition: no step has `kept` elements.
  FlatResults(PackedExchanges steps, const std::vector<at::Tensor>& tensors);

  // Returns the next result in memory of its own, or the received buffer itself if that is the sole result as
  // it lies. Waits for the collective if needed. Returns an undefined tensor after the last result.
  at::Tensor next();

 private:
  PackedExchanges steps_;
  size_t num_made_ = 0;
  std::vector<at::Tensor> received_;  // pending: the buffer, or a tensor for each step of an all_reduce
  std::vector<int64_t> begins_;       // by rank, of the next step's blocks
};

// Starts the one collective that does all of `steps`, of one signature, each on its tensor, unless no rank
// sends. The outputs are new tensors, in the order of the steps; the epilogue fills them. `scratch`, if
// given, is the buffer to send from: it is replaced if it does not fit, and no other code may use it. Errors
// name `op`.
StartedCollective start_together(PackedExchanges steps, std::vector<at::Tensor> tensors,
                                 at::Tensor* scratch = nullptr, const char* op = kRedistributeMany);

// Returns the outputs of start_together(), made by operators that every layer of PyTorch sees and autograd
// records. The group must have the ranks of the steps alone.
std::vector<at::Tensor> run_together(const PackedExchanges& steps, const std::vector<at::Tensor>& tensors);

}  // namespace funcol
