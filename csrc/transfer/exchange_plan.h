// Plans an exchange in a group: which blocks of its tensor a rank sends to each rank, and how the blocks that
// it receives make up its new tensor.
//
// The plan follows from the indices that each rank holds before and after: sizes need not divide, shards may
// be strided, and axes may cut a dim in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/shards.h"
#include "transfer/group_ranks.h"

namespace funcol {

// Returns the positions, in a tensor of the indices `held`, of the indices that `wanted` and `held` share.
// Both ascend, and so does the result. Worked case: {2, 4} in {0, 3} {5, 3} is {2, 2}: index 2 at position 2,
// index 5 at position 3.
Intervals positions(const Intervals& wanted, const Intervals& held);

// Positions of one dim in the wanted order, which need not ascend.
struct DimSelection {
  int64_t dim;
  Intervals positions;

  friend bool operator==(const DimSelection&, const DimSelection&) = default;
};

// A box of a tensor: the positions of each dim listed, and all of the other dims.
using Selection = std::vector<DimSelection>;

// Adds the positions of `wanted` in dim `dim` of a tensor with the indices `held`, unless they are all.
void select_dim(int64_t dim, const Intervals& wanted, const Intervals& held, Selection& selection);

// A part of a dim that a rank's new tensor takes from one block.
struct Piece {
  int64_t cut;         // the number of the shard, as the layout before cuts the dim within the group
  Interval positions;  // in the block of that shard
  bool is_full;        // the positions are all that the block has along the dim

  friend bool operator==(const Piece&, const Piece&) = default;
};

// One rank's part in an exchange of all with all. Indices of a block ascend along every dim.
struct Exchange {
  struct Sent {
    Selection selection;
    int64_t numel = 0;
  };
  struct Received {
    std::vector<int64_t> shape;
    int64_t numel = 0;
  };

  std::vector<Sent> sent;             // by group rank
  std::vector<Received> received;     // by group rank
  std::vector<int64_t> shape_before;  // of the rank's tensor
  std::vector<int64_t> shape_after;
  std::vector<std::vector<Piece>> pieces;  // by dim, in the order in which they make up the new tensor
  std::vector<int64_t> num_cuts;           // by dim
  std::vector<int64_t> sources;            // the group ranks that send the blocks, by block

  // Returns the cuts of a block, one per dim. Blocks are numbered along the last dim first.
  std::vector<int64_t> cuts_of(size_t block) const;
  // Returns the group rank that sends the block with these cuts.
  int64_t source(const std::vector<int64_t>& cuts) const;
};

// Returns the exchange, for the rank `ranks.own()`, from `before` to `after`. Both shard or replicate on the
// group's axes. If several ranks of the group hold the same block, a receiver takes it from the rank with its
// own coordinate on the axes that replicate: from itself if it holds the block.
Exchange plan_exchange(const Mesh& mesh, const Layout& before, const Layout& after,
                       const std::vector<int64_t>& shape, const GroupRanks& ranks);

}  // namespace funcol
