// Distributes a full tensor: every rank of a mesh gets its local tensor under the placements.
//
// PyTorch counterpart: torch.distributed.tensor.distribute_tensor. Here all scatters come before all
// broadcasts, so that replicas receive shards instead of full tensors.
//
// Worked case, (8, 4) as RS(0) on 2 x 4 ranks from ranks 0 of both axes: each row of ranks scatters 2 x 4
// elements a rank, then rank (0, j) broadcasts its 8 elements to (1, j). In the order of the axes, the full
// tensor of 32 would be broadcast before it is cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/placement.h"
#include "transfer/group_ranks.h"

namespace funcol {

struct Distribution {
  std::vector<Placement> placements;  // by mesh axis; no masks or norms, dims count from 0
  Mesh mesh;
  Coordinate coordinate;  // of this rank
  // The rank of each axis's group that sends; nullopt if every rank has the full tensor.
  std::optional<int64_t> source;

  bool communicates() const { return source.has_value(); }
};

// Raises ValueError unless the tensor has the dims that are cut, `source` is a rank of every axis, and
// partial placements are of sum, avg, min or max: a tensor cannot be split for other reductions.
void check(const Distribution& distribution, const at::Tensor& full);

// Returns this rank's local tensor; `distribution` has been checked. `groups` has a group for each axis, or
// is empty if nothing is sent, as on the meta device. Waits for each collective. If no axis cuts and `full`
// is contiguous, the result is `full`, into which ranks other than the source receive; else it has memory of
// its own.
at::Tensor distribute(const at::Tensor& full, const Distribution& distribution,
                      const std::vector<AxisGroup>& groups);

}  // namespace funcol
