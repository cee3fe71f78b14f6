// A step that sends, as a part of a collective that carries several tensors at once.
//
// All that a rank sends lies in one flat buffer, and so does all that it gets. Worked case, two ranks that
// gather a (2) and a (3) tensor: each sends 5 elements; of the 10 that come, 0 1 and 5 6 are the first
// tensor, 2 to 4 and 7 to 9 the second.
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

// One tensor's share in it, for one rank.
struct FlatStep {
  StepKind kind;
  c10::IValue group;
  std::string reduce_op;  // of all_reduce and reduce_scatter

  // A block a rank, or one for all: of an all_gather, the same is given to every rank; of a reduce_scatter,
  // one block comes. Of an all_reduce there are none.
  std::vector<BoxCopy> given;  // from the tensor to its block
  std::vector<BoxCopy> taken;  // from its block to the new tensor
  std::vector<int64_t> shape_after;

  // Steps that one collective can do, if their tensors have the same dtype and device. Not all that are equal
  // in this have the same sizes.
  std::string signature() const;
};

// A gather or scatter along `dim`: which positions of the whole tensor each rank's shard is.
FlatStep flat_all_gather(c10::IValue group, int64_t dim, const std::vector<Intervals>& shards,
                         std::vector<int64_t> whole_shape, int64_t own_rank);
FlatStep flat_reduce_scatter(c10::IValue group, std::string reduce_op, int64_t dim,
                             const std::vector<Intervals>& shards, std::vector<int64_t> whole_shape,
                             int64_t own_rank);
FlatStep flat_all_reduce(c10::IValue group, std::string reduce_op);
FlatStep flat_all_to_all(c10::IValue group, const Exchange& exchange);

// Starts the one collective that does all of `steps`, which have the same signature, on the tensor of each.
// The outputs are new tensors, in the order of the steps, not yet filled.
Start start_together(std::vector<std::shared_ptr<const FlatStep>> steps,
                     const std::vector<at::Tensor>& tensors);

}  // namespace funcol
