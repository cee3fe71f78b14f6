// The layout of a tensor on a mesh: a placement for each axis, and the order in which axes cut a common dim.
//
// PyTorch's counterparts are DTensorSpec.placements and DTensorSpec.shard_order. "Layout" always means this;
// the arrangement of elements in memory is called memory order or strides.
//
// Worked case: 8 rows on a mesh of 2 x 2 ranks, both axes S(0). In the shard order {0, 1} rank (0, 1) holds
// rows 2 and 3; in the shard order {1, 0} it holds rows 4 and 5.
#pragma once

#include <string>
#include <vector>

#include "layout/mesh.h"
#include "layout/placement.h"

namespace funcol {

// order[dim] lists the axes that shard dim `dim`, in the order of their cuts. It may end after the last
// sharded dim.
using ShardOrder = std::vector<std::vector<int64_t>>;

struct Layout {
  std::vector<Placement> placements;
  ShardOrder order;

  // Returns the axes that shard `dim`, in the order of their cuts.
  const std::vector<int64_t>& axes_of(int64_t dim) const;

  friend bool operator==(const Layout&, const Layout&) = default;
};

// Returns the order in which mesh axes cut each dim from the first axis to the last.
ShardOrder default_shard_order(const std::vector<Placement>& placements);
bool is_default(const ShardOrder& order);
// Appends `axis` to the axes that cut `dim`.
void add_cut(ShardOrder& order, int64_t dim, int64_t axis);

// Returns a checked layout, whose dims are counted from 0 and whose order names every sharding axis once. An
// empty `order` means the default shard order. Throws std::invalid_argument, with a text that begins with
// `caller`, if the number of placements differs from the number of mesh axes, a dim is out of range, a split
// factor is below 1 or above 2^31, partials do not commute, or the order contradicts the placements.
Layout make_layout(const std::string& caller, std::vector<Placement> placements, ShardOrder order,
                   const Mesh& mesh, int64_t num_dims);

// Returns `layout` with strided shards replaced by plain shards and a shard order, on each dim where every
// rank of a tensor of `shape` keeps the same elements.
//
// FSDP2 with tensor parallelism writes "first tp, then dp" as _S(0, 2)@dp S(0)@tp. The shard order shows that
// dp can be gathered alone. A dim keeps its strided shards if no shard order describes them, or if more than
// 4096 ranks cut it unevenly.
Layout without_strided_shards(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape);

// Returns the placements as PyTorch prints those of a spec: "S(0)R", "S(1)[1]S(1)[0]P(sum)".
std::string to_string(const Layout& layout);

}  // namespace funcol
