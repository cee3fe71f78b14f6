// The transfers of a tensor between two meshes as exchanges, which carry tensors together.
//
// Where a process group has exactly the ranks of both meshes, tensors go in one all_to_all. Where the
// smallest group has further ranks, which need not call, ranks send and receive in pairs.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "planner/transfer.h"
#include "transfer/packed_exchange.h"

namespace funcol {

// The process group of a transfer.
struct TransferGroup {
  c10::IValue group;           // as the funcol ops take it
  std::vector<int64_t> ranks;  // by group rank, as the meshes number them
  bool has_others = false;     // ranks of neither mesh
};

// Returns the exchange of one rank of either mesh. On a rank outside of the target the new tensor is of shape
// {0}. With `keeps_in_buffer`, the elements that the rank both holds and wants go through the buffers like
// the rest, so that only the buffers are needed once the exchange has started.
PackedExchange packed_transfer(const Transfer& transfer, const TransferGroup& group, int64_t rank,
                               bool keeps_in_buffer = false);

}  // namespace funcol
