// One tensor's step as a part of a collective that carries several tensors at once.
//
// A rank sends one flat buffer and receives one. Worked case, two ranks that gather tensors of 2 and of 3
// elements: each sends 5 elements; of the 10 received, 0 1 and 5 6 are the first tensor, 2 to 4 and 7 to 9
// the second. The part that a rank gathers of itself is packed into its place among the received ones.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

#include "planner/cost_model.h"
#include "transfer/blocks.h"
#include "transfer/box_copy.h"
#include "transfer/group_ranks.h"

namespace funcol {

// For one rank.
struct PackedExchange {
  StepKind kind;
  c10::IValue group;
  std::string reduce_op;  // of all_reduce and reduce_scatter

  // A block a rank. An all_gather sends one block, to every rank; a reduce_scatter receives one; an
  // all_reduce has none.
  std::vector<BoxCopy> sent;      // from the tensor to its block
  std::vector<BoxCopy> received;  // from its block to the new tensor
  std::vector<int64_t> shape_after;
  // The participants of an all_to_all among some ranks of a larger group, which goes point to point: their
  // ranks in the group, in the order of the blocks. Empty if the group has these ranks alone.
  std::vector<int64_t> peers = {};
  // The step and the global tensor, equal on all ranks of the group: what check_agreement() compares, beside
  // sizes of buffers, which tensors of other dims or in another order may share.
  std::string description = {};

  // Elements that arrive for this step, padding included: the same on all ranks of the group for an
  // all_gather.
  int64_t num_received() const;

  // Equal for steps that one collective can do, whatever their sizes, if their tensors have one dtype and
  // device.
  std::string signature() const;
};

// A signature of one or several steps: while it lives, equal ones are the same object.
using SharedSignature = std::shared_ptr<const std::string>;
SharedSignature shared_signature(const std::string& signature);
size_t num_shared_signatures();  // that live

// Gather and scatter along `dim`: `shards` has, by rank, the positions of its shard in the whole tensor.
PackedExchange flat_all_gather(c10::IValue group, int64_t dim, const std::vector<Intervals>& shards,
                               std::vector<int64_t> whole_shape, int64_t own_rank);
PackedExchange flat_reduce_scatter(c10::IValue group, std::string reduce_op, int64_t dim,
                                   const std::vector<Intervals>& shards, std::vector<int64_t> whole_shape,
                                   int64_t own_rank);
PackedExchange flat_all_reduce(c10::IValue group, std::string reduce_op);
PackedExchange flat_all_to_all(c10::IValue group, const Exchange& exchange);

// A whole tensor on one rank, from shards and back. `layout` has no partials; `ranks` are those of the step's
// group, `own_rank` among them, and `holder` is the coordinate of the rank with the whole. Where several
// ranks hold the same shard, the one that agrees with the holder on other axes sends it; all of them receive
// one. On a rank without the whole, the tensor before or after is empty.
struct HolderStep {
  c10::IValue group;
  std::vector<int64_t> peers;  // as PackedExchange has them
  const GroupRanks& ranks;
  const Mesh& mesh;
  const Layout& layout;
  const std::vector<int64_t>& shape;
  const Coordinate& holder;
};
PackedExchange flat_to_holder(const HolderStep& step);
PackedExchange flat_from_holder(const HolderStep& step);

}  // namespace funcol
