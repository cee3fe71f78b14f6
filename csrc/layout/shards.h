// Which elements of a tensor a rank holds, exactly, for any sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"

namespace funcol {

// The indices begin, begin + 1, ... of one dim.
struct Interval {
  int64_t begin = 0;
  int64_t size = 0;

  int64_t end() const { return begin + size; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// Indices along a dim in the order in which they lie in memory; neighbours are joined, nothing is empty.
using Intervals = std::vector<Interval>;

int64_t num_indices(const Intervals& intervals);

// What the rank `index` of `num_ranks` holds of `whole` under Shard with this split factor.
Intervals cut(const Intervals& whole, int64_t num_ranks, int64_t index, int64_t split_factor = 1);

// What the rank at `coordinate` holds of dim `dim`, `size` long.
Intervals local_indices(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size,
                        const Coordinate& coordinate);

// The shape of the tensor that the rank at `coordinate` holds.
std::vector<int64_t> local_shape(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                                 const Coordinate& coordinate);

// Whether every rank has as much of dim `dim`, `size` long, as every other; whether every rank has something.
bool is_cut_evenly(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size);
bool leaves_none_empty(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size);

// The length of the longest shard, that of index 0, when `size` indices are cut for `num_ranks` ranks.
int64_t longest_shard(int64_t size, int64_t num_ranks, int64_t split_factor = 1);

}  // namespace funcol
