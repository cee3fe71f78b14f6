#include "planner/dtensor_costs.h"

#include <algorithm>
#include <limits>

namespace funcol {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kStart = 6.6;

double ring_cost(double gb, double hops, const RingAxis& axis) {
  return kStart + hops * axis.latency_us + gb * hops / axis.num_ranks / axis.gb_per_s * 1e6;
}

// One step after the other; what is gathered or scattered makes the next one larger or smaller.
class Bill {
 public:
  Bill(double gb, const std::vector<RingAxis>& axes) : gb_(gb), axes_(axes) {}

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
      cost_ = kNever;
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

bool is_strided(const Layout& layout) {
  return std::ranges::any_of(layout.placements,
                             [](const auto& placement) { return placement.split_factor != 1; });
}

// Whether other axes before `axis` shard `dim` now than will in the end.
bool is_misaligned(const std::vector<Placement>& now, const std::vector<Placement>& target, int64_t dim,
                   size_t axis) {
  const auto shards = [dim](const Placement& placement) {
    return placement.is_shard() && placement.dim == dim;
  };
  for (size_t outer = 0; outer < axis; ++outer) {
    if (shards(now[outer]) != shards(target[outer])) {
      return true;
    }
  }
  return false;
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
  const bool is_whole =
      std::ranges::all_of(source.placements, [](const auto& placement) { return placement.is_replicate(); });
  if (is_whole || source == target) {
    return 0;
  }
  if (is_strided(source) || is_strided(target)) {
    return kNever;
  }
  double num_shards = 1;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    num_shards *= source.placements[axis].is_shard() ? axes[axis].num_ranks : 1;
  }
  Bill bill(bytes / num_shards / 1024 / 1024 / 1024, axes);
  auto now = source.placements;
  const auto move = [&](size_t axis, const Placement& to) {
    if (now[axis] != to) {
      bill.add(axis, now[axis], to);
      now[axis] = to;
    }
  };
  if (axes.size() > 1 && num_shards > 1) {
    for (size_t axis = axes.size(); axis-- > 0;) {
      const Placement& to = target.placements[axis];
      const bool is_blocked = to.is_shard() && is_misaligned(now, target.placements, to.dim, axis);
      move(axis, is_blocked ? Placement::replicate() : to);
    }
  }
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    move(axis, target.placements[axis]);
  }
  return bill.cost();
}

}  // namespace funcol
