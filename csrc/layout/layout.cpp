#include "layout/layout.h"

#include <algorithm>
#include <stdexcept>

#include "layout/shards.h"

namespace funcol {
namespace {

// The maximum number of ranks for which uneven shards are compared rank by rank.
constexpr int64_t kMaxRanksCompared = 4096;

std::string joined(const std::vector<Placement>& placements) {
  std::string text;
  for (const auto& placement : placements) {
    text += (text.empty() ? "" : ", ") + to_string(placement);
  }
  return "(" + text + ")";
}

[[noreturn]] void refuse(const std::string& caller, const std::string& why) {
  throw std::invalid_argument(caller + ": " + why);
}

void check_partials(const std::string& caller, const std::vector<Placement>& placements, const Mesh& mesh) {
  const Placement* first = nullptr;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto& placement = placements[axis];
    if (!placement.is_partial() || mesh.sizes[axis] == 1) {
      continue;
    }
    if (first != nullptr && !commute(*first, placement)) {
      refuse(caller,
             "placements " + joined(placements) +
                 " mix reductions whose result depends on which is done first. Reduce one of them before.");
    }
    first = &placement;
  }
}

void check_order(const std::string& caller, const Layout& layout) {
  size_t listed = 0;
  for (size_t dim = 0; dim < layout.order.size(); ++dim) {
    std::vector<int64_t> seen;
    for (const int64_t axis : layout.order[dim]) {
      const bool in_range = axis >= 0 && axis < static_cast<int64_t>(layout.placements.size());
      if (!in_range || !layout.placements[axis].is_shard() ||
          layout.placements[axis].dim != static_cast<int64_t>(dim) ||
          std::ranges::find(seen, axis) != seen.end()) {
        refuse(caller, "the shard order says that mesh axis " + std::to_string(axis) + " cuts dim " +
                           std::to_string(dim) + ", the placements are " + joined(layout.placements) +
                           ". List each axis that shards a dim once, under that dim.");
      }
      seen.push_back(axis);
    }
    listed += layout.order[dim].size();
  }
  const auto sharded = std::count_if(layout.placements.begin(), layout.placements.end(),
                                     [](const auto& placement) { return placement.is_shard(); });
  if (listed != static_cast<size_t>(sharded)) {
    refuse(caller, "the shard order lists " + std::to_string(listed) + " axes, but " +
                       std::to_string(sharded) + " of the placements " + joined(layout.placements) +
                       " are shards. List each axis that shards a dim once, or leave the order out.");
  }
}

// Appends to `order` the axes in the order in which plain shards cut the dim as its strided shards do.
// Returns false if no order does. An axis that cuts after later mesh axes has the product of their sizes as
// its split factor. PyTorch's counterpart: DTensorSpec._maybe_convert_StridedShard_to_shard_order.
bool order_of_strided(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& axes,
                      std::vector<int64_t>& order) {
  const std::vector<int64_t> inner_first(axes.rbegin(), axes.rend());
  for (const int64_t axis : inner_first) {
    int64_t cut_before = 1;
    size_t place = 0;
    while (place < order.size() && cut_before != layout.placements[axis].split_factor) {
      cut_before *= mesh.sizes[order[place++]];
    }
    if (cut_before != layout.placements[axis].split_factor) {
      return false;
    }
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(place), axis);
  }
  return true;
}

bool same_indices(const Layout& a, const Layout& b, const Mesh& mesh, int64_t dim, int64_t size) {
  AxisSet axes = 0;
  for (const int64_t axis : a.axes_of(dim)) {
    axes |= axis_set(axis);
  }
  const int64_t num_ranks = mesh.num_ranks(axes);
  if (size % num_ranks == 0) {
    return true;
  }
  if (num_ranks > kMaxRanksCompared) {
    return false;
  }
  return for_all_coordinates(mesh, a.axes_of(dim), [&](const Coordinate& coordinate) {
    return local_indices(a, mesh, dim, size, coordinate) == local_indices(b, mesh, dim, size, coordinate);
  });
}

}  // namespace

const std::vector<int64_t>& Layout::axes_of(int64_t dim) const {
  static const std::vector<int64_t> none;
  return dim < static_cast<int64_t>(order.size()) ? order[dim] : none;
}

ShardOrder default_shard_order(const std::vector<Placement>& placements) {
  ShardOrder order;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard()) {
      add_cut(order, placements[axis].dim, static_cast<int64_t>(axis));
    }
  }
  return order;
}

bool is_default(const ShardOrder& order) {
  return std::ranges::all_of(order, [](const auto& axes) { return std::ranges::is_sorted(axes); });
}

void add_cut(ShardOrder& order, int64_t dim, int64_t axis) {
  order.resize(std::max(order.size(), static_cast<size_t>(dim) + 1));
  order[dim].push_back(axis);
}

Layout make_layout(const std::string& caller, std::vector<Placement> placements, ShardOrder order,
                   const Mesh& mesh, int64_t num_dims) {
  if (static_cast<int64_t>(placements.size()) != mesh.num_axes()) {
    refuse(caller, std::to_string(placements.size()) + " placements " + joined(placements) +
                       " for a mesh of " + std::to_string(mesh.num_axes()) +
                       " axes. Give one placement for each axis.");
  }
  for (auto& placement : placements) {
    if (!placement.is_shard()) {
      continue;
    }
    if (placement.dim < -num_dims || placement.dim >= num_dims) {
      refuse(caller, to_string(placement) + " shards a dim that a tensor of " + std::to_string(num_dims) +
                         " dims does not have. " +
                         (num_dims == 0 ? std::string("Replicate it.")
                                        : "Use a dim from " + std::to_string(-num_dims) + " to " +
                                              std::to_string(num_dims - 1) + "."));
    }
    constexpr int64_t kMostPieces = int64_t{1} << 31;
    if (placement.split_factor < 1 || placement.split_factor > kMostPieces) {
      refuse(caller, to_string(placement) + " has a split factor below 1, or above 2^31.");
    }
    placement.dim += placement.dim < 0 ? num_dims : 0;
  }
  check_partials(caller, placements, mesh);
  Layout layout{std::move(placements), std::move(order)};
  if (layout.order.empty()) {
    layout.order = default_shard_order(layout.placements);
  } else {
    check_order(caller, layout);
    while (!layout.order.empty() && layout.order.back().empty()) {
      layout.order.pop_back();
    }
  }
  return layout;
}

Layout without_strided_shards(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape) {
  Layout result = layout;
  for (size_t dim = 0; dim < layout.order.size(); ++dim) {
    const auto& axes = layout.order[dim];
    const bool strided =
        std::ranges::any_of(axes, [&](int64_t axis) { return layout.placements[axis].is_strided(); });
    std::vector<int64_t> order;
    if (!strided || !std::ranges::is_sorted(axes) || !order_of_strided(layout, mesh, axes, order)) {
      continue;
    }
    Layout plain = result;
    plain.order[dim] = order;
    for (const int64_t axis : axes) {
      plain.placements[axis].split_factor = 1;
    }
    if (same_indices(layout, plain, mesh, static_cast<int64_t>(dim), shape[dim])) {
      result = std::move(plain);
    }
  }
  return result;
}

std::string to_string(const Layout& layout) {
  std::string text;
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    const auto& placement = layout.placements[axis];
    text += to_string(placement);
    if (placement.is_shard() && layout.axes_of(placement.dim).size() > 1) {
      const auto& axes = layout.axes_of(placement.dim);
      text += "[" + std::to_string(std::ranges::find(axes, static_cast<int64_t>(axis)) - axes.begin()) + "]";
    }
  }
  return text;
}

}  // namespace funcol
