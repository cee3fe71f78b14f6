// One tensor's step as a part of a collective that carries several tensors at once.
//
// A rank sends one flat buffer and receives one. Worked case, two ranks that gather tensors of 2 and of 3
// elements: each sends 5 elements; of the 10 received, 0 1 and 5 6 are the first tensor, 2 to 4 and 7 to 9
// the second. A rank packs its own part into its place among the received ones.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planner/cost_model.h"
#include "transfer/box_copy.h"
#include "transfer/exchange_plan.h"

namespace funcol {

// A copy between a rank's tensor and the buffer's part of one rank of the group, where blocks lie one after
// the other.
struct PeerBlock {
  int64_t rank;
  BoxCopy copy;
};

// One rank's part of a step.
struct PackedExchange {
  StepKind kind;
  c10::IValue group;
  int64_t num_ranks;           // of the group
  std::string reduce_op = {};  // of all_reduce and reduce_scatter

  // By rank. An all_gather sends one block, its own; a reduce_scatter receives one; an all_reduce has none.
  std::vector<PeerBlock> sent = {};      // from the tensor to the buffer
  std::vector<PeerBlock> received = {};  // from the buffer to the new tensor
  std::optional<BoxCopy> kept = {};      // from the tensor to the new one, bypassing the buffers
  std::vector<int64_t> shape_after = {};
  bool communicates = true;  // true if any rank sends
  // True if ranks send and receive in pairs. Ranks of the group that take no part need not call then.
  bool in_pairs = false;
  std::string participants = {};  // in pairs: the ranks that take part, as text
  // The step and the global tensor, equal on all ranks of the group: what check_agreement() compares, besides
  // sizes of buffers, which tensors of other dims or in another order may share.
  std::string description = {};

  // Returns the number of elements that arrive for this step, including padding: the same on all ranks of the
  // group for an all_gather.
  int64_t num_received() const;

  std::string signature() const;
};

// Returns a text that is equal for steps that one collective can do, whatever their sizes, if their tensors
// have the same dtype and device.
std::string signature_of(StepKind kind, const c10::IValue& group, const std::string& reduce_op = {},
                         const std::string& participants = {});

// A signature of one or several steps. While it lives, equal signatures are the same object.
using SharedSignature = std::shared_ptr<const std::string>;
SharedSignature shared_signature(const std::string& signature);
size_t num_shared_signatures();  // that live

// Makes a gather or scatter along `dim`. `shards` has the positions of each rank's shard in the full tensor.
PackedExchange packed_all_gather(c10::IValue group, int64_t dim, const std::vector<Intervals>& shards,
                                 std::vector<int64_t> full_shape, int64_t own_rank);
PackedExchange packed_reduce_scatter(c10::IValue group, std::string reduce_op, int64_t dim,
                                     const std::vector<Intervals>& shards, std::vector<int64_t> full_shape,
                                     int64_t own_rank);
PackedExchange packed_all_reduce(c10::IValue group, int64_t num_ranks, std::string reduce_op);
PackedExchange packed_all_to_all(c10::IValue group, const Exchange& exchange);

}  // namespace funcol
