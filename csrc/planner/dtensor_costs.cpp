#include "planner/dtensor_costs.h"

#include <algorithm>

#include "planner/greedy_order.h"

namespace funcol {
namespace {

constexpr double kBaseLatencyUs = 6.6;

double ring_cost(double gb, double hops, const RingAxis& axis) {
  return kBaseLatencyUs + hops * axis.latency_us + gb * hops / axis.num_ranks / axis.gb_per_s * 1e6;
}

// The costs of steps, one after the other: a gather makes the next steps larger, a scatter makes them
// smaller.
class CostSum {
 public:
  CostSum(double gb, const std::vector<RingAxis>& axes) : gb_(gb), axes_(axes) {}

  void add(size_t axis, const Placement& from, const Placement& to) {
    const RingAxis& ring = axes_[axis];
    const double hops = ring.num_ranks - 1;
    if (from.is_shard() && to.is_replicate()) {
      gb_ *= ring.num_ranks;
      cost_ += ring_cost(gb_, hops, ring);
    } else if (from.is_shard() && to.is_shard()) {
      cost_ += ring_cost(gb_, hops, ring) + 1.0;
    } else if (from.is_partial() && to.is_replicate()) {
      cost_ += ring_cost(gb_, 2 * hops, ring);
    } else if (from.is_partial() && to.is_shard()) {
      cost_ += ring_cost(gb_, hops, ring);
      gb_ /= ring.num_ranks;
    } else if (!from.is_replicate()) {
      cost_ = kImpossible;
    } else if (to.is_shard()) {
      gb_ /= ring.num_ranks;
    }
  }

  double cost() const { return cost_; }

 private:
  double gb_;
  const std::vector<RingAxis>& axes_;
  double cost_ = 0;
};

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
  CostSum sum(bytes / num_shards / 1024 / 1024 / 1024, axes);
  visit_greedy_moves(
      source.placements, target.placements, num_shards > 1,
      [&sum](size_t axis, const Placement& from, const Placement& to) { sum.add(axis, from, to); });
  return sum.cost();
}

}  // namespace funcol
