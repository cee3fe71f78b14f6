// A whole tensor, which one rank of every mesh axis has, becomes what each rank of the mesh holds of it.
//
// PyTorch counterpart: torch.distributed.tensor.distribute_tensor, with the same collectives in another
// order: what is cut is scattered first, so that replicas receive shards instead of whole tensors.
//
// Worked case, (8, 4) as RS(0) on 2 x 4 ranks from ranks 0 of both axes: each row of ranks scatters 2 x 4
// elements a rank, then rank (0, j) broadcasts its 8 elements to (1, j). In the order of the axes the whole
// tensor of 32 would be broadcast before it is cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/process_group.h"
#include "layout/mesh.h"
#include "layout/placement.h"

namespace funcol {

struct Distribution {
  std::vector<Placement> placements;  // of each mesh axis; no masks or norms, dims counted from 0
  Mesh mesh;
  Coordinate coordinate;  // of this rank
  // The rank of each axis's group that sends; none: every rank has the whole tensor.
  std::optional<int64_t> source;

  bool communicates() const { return source.has_value(); }
};

// The process group along a mesh axis.
struct GroupOfAxis {
  GroupPtr group;
  std::vector<int64_t> places;  // along the axis, of each rank of the group; empty: 0, 1, 2, ...
};

// ValueError unless the tensor has the dims that are cut, `source` is a rank of every axis, and what is
// partial is a reduction with parts that make up the whole: sum, avg, min, max.
void check(const Distribution& how, const at::Tensor& whole);

// What this rank holds; `how` has been checked. `groups` are those of the axes; empty if nothing is sent,
// which on the meta device is always so. Waits for each collective. Where nothing is cut the result is
// `whole` if that is contiguous, received into on ranks other than the source; else it is a tensor of its
// own.
at::Tensor distribute(const at::Tensor& whole, const Distribution& how,
                      const std::vector<GroupOfAxis>& groups);

}  // namespace funcol
