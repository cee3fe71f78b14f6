// Runs the plans of many tensors from one mesh to another, a batch at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transfer/executor.h"
#include "transfer/packed_exchange.h"

namespace funcol {

// A plan made ready for this rank: its parts one after the other. All are null on a rank outside of both
// meshes.
struct MeshChangeParts {
  std::shared_ptr<const Execution> before;  // on the source mesh
  std::shared_ptr<const PackedExchange> transfer;
  std::shared_ptr<const Execution> after;  // on the target mesh
  int64_t peak_bytes = 0;                  // the most memory that a rank needs; equal on all ranks

  size_t heap_bytes() const {
    return (before ? before->heap_bytes() : 0) + (after ? after->heap_bytes() : 0) + (transfer ? 2048 : 0);
  }
};

struct MeshChangeItem {
  std::shared_ptr<const MeshChangeParts> parts;
  at::Tensor local;  // on a rank outside of the source mesh, any tensor of the dtype and device
};

// The new local tensors: in memory of their own, pending only with `async_op`. All ranks of both meshes call
// it with the items in the same order.
//
// Items of one dtype travel together, as many as have peaks of `together_bytes` in sum. One batch is packed
// and sent while the one before arrives, so that two of them are in memory, beside the tensors before and
// after. With `async_op` all batches are started, and kept until their tensors are used.
std::vector<at::Tensor> run_mesh_changes(std::vector<MeshChangeItem> items, bool async_op,
                                         int64_t together_bytes);

}  // namespace funcol
