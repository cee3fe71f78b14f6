// How a mesh holds a tensor: a placement for each axis, and in which order axes that cut the same dim do so.
//
// PyTorch's counterparts are DTensorSpec.placements and DTensorSpec.shard_order. Worked case, 8 rows, axes of
// 2 x 2 ranks, both S(0): in the order {0, 1} rank (0, 1) holds rows 2 3, in the order {1, 0} rows 4 5.
#pragma once

#include <string>
#include <vector>

#include "layout/mesh.h"
#include "layout/placement.h"

namespace funcol {

// order[dim] lists the axes that shard the dim, first cut first. Dims behind the last sharded one may be left
// out.
using ShardOrder = std::vector<std::vector<int64_t>>;

struct Layout {
  std::vector<Placement> placements;
  ShardOrder order;

  // The axes that cut `dim`, first cut first.
  const std::vector<int64_t>& axes_of(int64_t dim) const;

  friend bool operator==(const Layout&, const Layout&) = default;
};

// Axes that shard a dim, from the first mesh axis to the last.
ShardOrder default_shard_order(const std::vector<Placement>& placements);
bool is_default(const ShardOrder& order);

// A layout whose dims are counted from 0 and whose order names every sharding axis once; an empty `order` is
// the default one. Throws std::invalid_argument, beginning with `what`, if the number of placements is not
// the mesh's, a dim is out of range, a split factor is not positive, partials that do not commute are mixed,
// or the order and the placements contradict each other.
Layout make_layout(const std::string& what, std::vector<Placement> placements, ShardOrder order,
                   const Mesh& mesh, int64_t num_dims);

// The same data with strided shards written as a shard order wherever that is the same for a tensor of
// `shape`.
//
// FSDP2 with tensor parallelism writes "first tp, then dp" as _S(0, 2)@dp S(0)@tp. As an order it is known
// that dp can be gathered alone. Layouts that no order describes keep their strided shards, and so do dims
// that more than 4096 ranks cut unevenly.
Layout without_strided_shards(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape);

// As PyTorch prints a spec's placements: "S(0)R", "S(1)[1]S(1)[0]P(sum)".
std::string to_string(const Layout& layout);

}  // namespace funcol
