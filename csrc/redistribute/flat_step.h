// One tensor's step as a part of a collective that carries several tensors at once.
//
// A rank sends one flat buffer and receives one. Worked case, two ranks that gather tensors of 2 and of 3
// elements: each sends 5 elements; of the 10 received, 0 1 and 5 6 are the first tensor, 2 to 4 and 7 to 9
// the second.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

#include "ops/collectives.h"
#include "planner/cost_model.h"
#include "redistribute/blocks.h"
#include "redistribute/box_copy.h"

namespace funcol {

// For one rank.
struct FlatStep {
  StepKind kind;
  c10::IValue group;
  std::string reduce_op;  // of all_reduce and reduce_scatter

  // A block a rank. An all_gather sends one block, to every rank; a reduce_scatter receives one; an
  // all_reduce has none.
  std::vector<BoxCopy> sent;      // from the tensor to its block
  std::vector<BoxCopy> received;  // from its block to the new tensor
  std::vector<int64_t> shape_after;

  // Equal for steps that one collective can do, whatever their sizes, if their tensors have one dtype and
  // device.
  std::string signature() const;
};

// Gather and scatter along `dim`: `shards` has, by rank, the positions of its shard in the whole tensor.
FlatStep flat_all_gather(c10::IValue group, int64_t dim, const std::vector<Intervals>& shards,
                         std::vector<int64_t> whole_shape, int64_t own_rank);
FlatStep flat_reduce_scatter(c10::IValue group, std::string reduce_op, int64_t dim,
                             const std::vector<Intervals>& shards, std::vector<int64_t> whole_shape,
                             int64_t own_rank);
FlatStep flat_all_reduce(c10::IValue group, std::string reduce_op);
FlatStep flat_all_to_all(c10::IValue group, const Exchange& exchange);

// Starts the one collective that does all of `steps`, of one signature, each on its tensor. The outputs are
// new tensors, in the order of the steps; the epilogue fills them.
Start start_together(std::vector<std::shared_ptr<const FlatStep>> steps,
                     const std::vector<at::Tensor>& tensors);

}  // namespace funcol
