// Which parts of its tensor a rank sends to which rank of a group, and how what comes makes up its new
// tensor.
//
// Everything follows from the indices that each rank holds before and after: sizes need not divide, shards
// may be strided, and axes may cut a dim in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/shards.h"
#include "redistribute/group_ranks.h"

namespace funcol {

// Where the indices of `wanted` that `held` has too lie in a tensor of the indices `held`. Both ascend, and
// so does the result. Worked case: {2, 4} in {0, 3} {5, 3} is {2, 2}: index 2 at position 2, index 5 at
// position 3.
Intervals positions(const Intervals& wanted, const Intervals& held);

// The indices that both have.
Intervals intersection(const Intervals& a, const Intervals& b);

// A selection of one dim: positions in the order wanted, which need not ascend.
struct DimSelection {
  int64_t dim;
  Intervals positions;

  friend bool operator==(const DimSelection&, const DimSelection&) = default;
};

// A box of a tensor: of each dim listed those positions, of the others all.
using Selection = std::vector<DimSelection>;

// What dim `dim` of a tensor with the indices `held` keeps to hold `wanted`: added to `selection` unless it
// is all.
void select_dim(int64_t dim, const Intervals& wanted, const Intervals& held, Selection& selection);

// A part of a dim that a rank's new tensor takes from one block.
struct Piece {
  int64_t cut;         // which of the shards of this dim, as the layout before cuts it within the group
  Interval positions;  // in the block of that shard
  bool is_whole;       // all that the block has along the dim

  friend bool operator==(const Piece&, const Piece&) = default;
};

// One rank's part in an exchange of all with all. Blocks have their indices in ascending order along every
// dim.
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
  std::vector<int64_t> sources;            // the group rank that sends the block, by its cuts, last dim first

  // The rank whose block has these cuts, one a dim.
  int64_t source(const std::vector<int64_t>& cuts) const;
};

// What the rank `ranks.own()` does to come from `before` to `after`, where placements of the group's axes are
// shards or replicate. Where several ranks of the group hold the same, each receiver takes it from the one
// that stands where it stands itself on the axes that replicate, so from itself if it holds it.
Exchange plan_exchange(const Mesh& mesh, const Layout& before, const Layout& after,
                       const std::vector<int64_t>& shape, const GroupRanks& ranks);

}  // namespace funcol
