// PyTorch's cost model for a redistribution of a DTensor.
//
// PyTorch's counterpart: torch.distributed.tensor._collective_utils.redistribute_cost. With the same sharding
// rules, propagation under this model picks the same placements as PyTorch.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "layout/layout.h"
#include "layout/mesh.h"

namespace funcol {

// The cost of a redistribution that cannot be done.
inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

// DTensor's cost model, on rings of ranks: 87.7 GB/s and 0.6 us a hop within a host, 22 % of that bandwidth
// and 2.7 us a hop between hosts.
struct DTensorCosts {
  friend bool operator==(const DTensorCosts&, const DTensorCosts&) = default;
};

// The ring of ranks along a mesh axis.
struct RingAxis {
  double num_ranks = 1;
  double latency_us = 0;  // of a hop
  double gb_per_s = 0;    // bandwidth in units of 2^30 bytes
};

// Returns the ring of each mesh axis. The ranks of a host are neighbors along the last axes, so every axis
// before one that crosses hosts crosses them too.
std::vector<RingAxis> ring_axes(const Mesh& mesh);

// PyTorch's cost of one step, and the units of 2^30 bytes that the rank holds afterwards. A step from or to a
// strided shard costs 0.
struct StepPrice {
  double cost_us = 0;
  double gb = 0;
};
StepPrice dtensor_step(const Placement& from, const Placement& to, double gb, const RingAxis& ring);

// Returns the cost of PyTorch's greedy plan in microseconds. Each step costs the ring's time for the bytes
// that the rank holds at that point; an exchange between dims costs 1 us more than a gather. A replicated
// source costs 0. Returns kImpossible for redistributions that PyTorch never plans by itself: shard to
// partial, one partial to another, and a strided shard to or from any other placement. `bytes` is the size of
// the full tensor. Both layouts have the default shard order.
//
// Worked case, f32[4, 4] on 2 ranks of two hosts: S(0) -> R: 6.6 + 2.7 + 64 / 2 ^ 30 / 2 / 19.294 * 1e6 us.
double dtensor_cost(const Layout& source, const Layout& target, double bytes,
                    const std::vector<RingAxis>& axes);

}  // namespace funcol
