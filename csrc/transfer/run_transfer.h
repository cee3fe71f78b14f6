// Runs the transfers of tensors between two meshes together.
//
// Where a process group has exactly the ranks of both meshes, the tensors go in one all_to_all.
// Where the smallest group has further ranks, which need not call, ranks send and receive in pairs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "async/pending_collective.h"
#include "planner/transfer.h"
#include "transfer/box_copy.h"

namespace funcol {

// The process group of a transfer.
struct TransferGroup {
  c10::IValue group;           // as the funcol ops take it
  std::vector<int64_t> ranks;  // by group rank, in the world
  bool has_others = false;     // ranks of neither mesh
};

// A transfer made ready for one rank of either mesh.
class TransferPart {
 public:
  TransferPart(const Transfer& transfer, std::shared_ptr<const TransferGroup> group, int64_t rank);

  // Copies between the rank's tensor and the blocks that it exchanges with another rank, which lie one after
  // the other in a flat buffer.
  struct Peer {
    int64_t rank;  // in the group
    std::vector<BoxCopy> blocks;
    int64_t numel = 0;
  };

  const std::vector<Peer>& sent() const { return sent_; }          // by rank
  const std::vector<Peer>& received() const { return received_; }  // by rank
  // From the old tensor to the new one; none if they have no elements in common.
  const std::optional<BoxCopy>& kept() const { return kept_; }
  const std::shared_ptr<const TransferGroup>& group() const { return group_; }
  // Returns true if any rank sends anything.
  bool communicates() const { return communicates_; }
  // {0} on a rank outside of the mesh.
  const std::vector<int64_t>& shape_after() const { return shape_after_; }

 private:
  std::shared_ptr<const TransferGroup> group_;
  std::vector<Peer> sent_;
  std::vector<Peer> received_;
  std::optional<BoxCopy> kept_;
  bool communicates_;
  std::vector<int64_t> shape_after_;
};

struct TransferItem {
  std::shared_ptr<const TransferPart> part;
  at::Tensor local;  // on a rank outside of the source mesh, any tensor of the dtype and device
};

// The transfers of tensors of one dtype, which travel in one collective.
class StartedTransfers {
 public:
  // Starts them. All ranks of both meshes do it with the items in the same order. `scratch`, a flat buffer
  // that nobody else has, is sent from if it is large enough.
  explicit StartedTransfers(std::vector<TransferItem> items, const at::Tensor& scratch = {});

  // The new local tensors: contiguous, in memory of their own. Pending with `async_op`; else they have
  // arrived.
  std::vector<at::Tensor> results(bool async_op);

  // The buffer that was sent, once the results have arrived. Transfers that follow use it again: an allocator
  // that does not fit an aligned block into the hole of an equal one, as glibc's before 2.38, would take new
  // memory for each.
  at::Tensor take_scratch() { return pending_ ? at::Tensor() : std::move(sent_); }

 private:
  std::vector<at::Tensor> results_;
  at::Tensor sent_;
  c10::intrusive_ptr<PendingCollective> pending_;  // null if nothing is sent, or all has arrived
};

}  // namespace funcol
