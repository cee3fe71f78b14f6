// What PyTorch's DTensor takes a redistribution to cost.
//
// Source: torch.distributed.tensor._collective_utils.redistribute_cost. Decisions that are priced by it are
// those of PyTorch, where rules are.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"
#include "layout/mesh.h"

namespace funcol {

// Rings of ranks: within a host 87.7 GB/s and 0.6 us a hop, between hosts 22 % of that and 2.7 us.
struct DTensorCosts {
  friend bool operator==(const DTensorCosts&, const DTensorCosts&) = default;
};

// An axis of a mesh.
struct RingAxis {
  double num_ranks = 1;
  double latency_us = 0;  // a hop
  double gb_per_s = 0;    // of 2^30 bytes
};

// The axes behind an axis that leaves the host leave it, too, as the ranks of a host stand together.
std::vector<RingAxis> ring_axes(const Mesh& mesh);

// Microseconds of PyTorch's greedy plan, whose steps are priced by the bytes on the way: of a gather or a
// reduction, and 1 us more for an exchange between dims than for a gather. Free from a tensor that every rank
// holds; infinity for what PyTorch does not do unasked: shards to partials, one partial to another, and
// strided shards to and from anything else. `bytes` are those of the whole tensor. Both layouts are in the
// default shard order.
//
// Worked case, f32[4, 4] on 2 ranks of two hosts: S(0) -> R: 6.6 + 2.7 + 64 / 2 ^ 30 / 2 / 19.294 * 1e6 us.
double dtensor_cost(const Layout& source, const Layout& target, double bytes,
                    const std::vector<RingAxis>& axes);

}  // namespace funcol
