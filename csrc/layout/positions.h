// The positions in a full tensor of the elements of a shard.
//
// The position of an element is its number in the full tensor, the last dim counted first.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/shards.h"

namespace funcol {

// Elements that follow each other in the shard and in the full tensor.
struct PositionRun {
  int64_t local = 0;  // position of the first element in the shard
  int64_t full = 0;   // and in the full tensor
  int64_t size = 0;

  friend bool operator==(const PositionRun&, const PositionRun&) = default;
};

// Elements whose positions have a stride for each dim, in the shard and in the full tensor.
struct PositionBox {
  struct Dim {
    int64_t size = 1;
    int64_t local_stride = 1;
    int64_t full_stride = 1;

    friend bool operator==(const Dim&, const Dim&) = default;
  };

  int64_t local = 0;  // position of the first element in the shard
  int64_t full = 0;   // and in the full tensor
  std::vector<Dim> dims;

  friend bool operator==(const PositionBox&, const PositionBox&) = default;
};

// One Shard of a dim: this rank is number `index` of the `num_ranks` ranks that share what the cuts of the
// dim before this one have left.
struct ShardCut {
  int64_t dim = 0;
  int64_t num_ranks = 1;
  int64_t index = 0;
  int64_t split_factor = 1;
};

// The positions of a shard's elements. Worked case: rank 1 of 2 holds columns 2 and 3 of a (3, 4) tensor. Its
// runs are {0, 2, 2}, {2, 6, 2} and {4, 10, 2}.
class Positions {
 public:
  Positions(const std::vector<int64_t>& shape, const std::vector<ShardCut>& cuts);

  int64_t numel() const { return num_rows_ * row_size_; }

  // Returns the runs of the elements [begin, end) of the shard, in order.
  std::vector<PositionRun> runs(int64_t begin, int64_t end) const;

  // Returns all elements in as few boxes as the intervals of the cut dims allow: one for a plain Shard.
  // Merges neighboring dims of a box if one stride covers them in both tensors.
  std::vector<PositionBox> boxes() const;

 private:
  struct OuterDim {
    Intervals held;
    int64_t size;    // of all of `held`
    int64_t stride;  // in the full tensor
  };

  int64_t begin_of_row(int64_t row) const;

  // The dims before the last one that is cut, from the last to the first. A row is one index of each of them.
  std::vector<OuterDim> outer_;
  std::vector<PositionRun> in_row_;
  int64_t num_rows_ = 1;
  int64_t row_size_ = 1;
};

}  // namespace funcol
