// The indices of a tensor that each rank holds under a layout, exact for uneven sizes too.
#pragma once

#include <cstdint>
#include <functional>
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

// Indices along a dim in memory order. Adjacent intervals are joined, and none is empty.
using Intervals = std::vector<Interval>;

// Appends `next`, joined with the last interval if it continues that one. Appends nothing if `next` is empty.
void append(Intervals& intervals, const Interval& next);

int64_t num_indices(const Intervals& intervals);

// Returns the indices that `a` and `b` share, or the number of these. Both lists ascend.
Intervals common_indices(const Intervals& a, const Intervals& b);
int64_t num_common(const Intervals& a, const Intervals& b);

// Appends to `out` the indices at positions [begin, end) of `indices`.
void append_range(const Intervals& indices, int64_t begin, int64_t end, Intervals& out);

// Returns the share of `indices` that rank `index` of `num_ranks` holds under a Shard with this split factor.
Intervals cut(const Intervals& indices, int64_t num_ranks, int64_t index, int64_t split_factor = 1);

// Returns the indices of dim `dim`, `size` long, that the rank at `coordinate` holds.
Intervals local_indices(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size,
                        const Coordinate& coordinate);
// Returns the indices of each dim of a tensor of `shape` that the rank holds.
std::vector<Intervals> local_indices(const Layout& layout, const Mesh& mesh,
                                     const std::vector<int64_t>& shape, const Coordinate& coordinate);

// Returns the shape of the tensor that the rank at `coordinate` holds.
std::vector<int64_t> local_shape(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                                 const Coordinate& coordinate);

// Returns true if all ranks hold equally many indices of dim `dim`, `size` long.
bool is_cut_evenly(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size);
// Returns true if every rank holds at least one index of dim `dim`, `size` long, or if no axis cuts the dim.
bool leaves_none_empty(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size);

// Returns the length of the longest shard, rank 0's, when `size` indices are cut for `num_ranks` ranks.
int64_t longest_shard(int64_t size, int64_t num_ranks, int64_t split_factor = 1);

// Calls `visit` for each coordinate on `axes`, 0 on other axes, until a call returns false. Returns true if
// no call did.
bool for_all_coordinates(const Mesh& mesh, const std::vector<int64_t>& axes,
                         const std::function<bool(const Coordinate&)>& visit);

}  // namespace funcol
