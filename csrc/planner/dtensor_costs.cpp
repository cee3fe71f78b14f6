#include "planner/dtensor_costs.h"

#include <algorithm>

#include "planner/greedy_order.h"

namespace funcol {
namespace {

constexpr double kBaseLatencyUs = 6.6;

double ring_cost(double gb, double hops, const RingAxis& axis) {
  return kBaseLatencyUs + hops * axis.latency_us + gb * hops / axis.num_ranks / axis.gb_per_s * 1e6;
}

bool is_plain_shard(const Placement& placement) { return placement.is_shard() && !placement.is_strided(); }

bool has_strided_shard(const Layout& layout) {
  return std::ranges::any_of(layout.placements, &Placement::is_strided);
}

}  // namespace

std::vector<RingAxis> ring_axes(const Mesh& mesh) {
  constexpr double kBandwidth = 87.7;
  constexpr double kShareBetweenHosts = 0.22;
  constexpr double kHopUs = 0.6;
  constexpr double kHopBetweenHostsUs = 2.7;
  std::vector<RingAxis> axes(mesh.sizes.size());
  int64_t num_ranks = 1;
  for (size_t axis = axes.size(); axis-- > 0;) {
    num_ranks *= mesh.sizes[axis];
    const bool leaves_host = num_ranks > mesh.ranks_per_host;
    axes[axis] = {static_cast<double>(mesh.sizes[axis]), leaves_host ? kHopBetweenHostsUs : kHopUs,
                  leaves_host ? kBandwidth * kShareBetweenHosts : kBandwidth};
  }
  return axes;
}

StepPrice dtensor_step(const Placement& from, const Placement& to, double gb, const RingAxis& ring) {
  const double hops = ring.num_ranks - 1;
  if (from == to) {
    return {0, gb};
  }
  if (is_plain_shard(from) && to.is_replicate()) {
    gb *= ring.num_ranks;
    return {ring_cost(gb, hops, ring), gb};
  }
  if (is_plain_shard(from) && is_plain_shard(to)) {
    return {ring_cost(gb, hops, ring) + 1.0, gb};
  }
  if (from.is_partial() && to.is_replicate()) {
    return {ring_cost(gb, 2 * hops, ring), gb};
  }
  if (from.is_partial() && is_plain_shard(to)) {
    return {ring_cost(gb, hops, ring), gb / ring.num_ranks};
  }
  if ((is_plain_shard(from) || from.is_partial()) && to.is_partial()) {
    return {kImpossible, gb};
  }
  if (from.is_replicate() && is_plain_shard(to)) {
    return {0, gb / ring.num_ranks};
  }
  return {0, gb};
}

double dtensor_cost(const Layout& source, const Layout& target, double bytes,
                    const std::vector<RingAxis>& axes) {
  if (std::ranges::all_of(source.placements, &Placement::is_replicate) || source == target) {
    return 0;
  }
  if (has_strided_shard(source) || has_strided_shard(target)) {
    return kImpossible;
  }
  double num_shards = 1;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    num_shards *= source.placements[axis].is_shard() ? axes[axis].num_ranks : 1;
  }
  // The steps are priced in order: a gather makes the next steps larger, a scatter makes them smaller.
  double cost = 0;
  double gb = bytes / num_shards / 1024 / 1024 / 1024;
  visit_greedy_moves(source.placements, target.placements, num_shards > 1,
                     [&](size_t axis, const Placement& from, const Placement& to) {
                       const auto step = dtensor_step(from, to, gb, axes[axis]);
                       cost += step.cost_us;
                       gb = step.gb;
                     });
  return cost;
}

}  // namespace funcol
