#include "planner/common_mesh.h"

#include <algorithm>
#include <utility>

namespace funcol {
namespace {

// The most ranks of a mesh on which layouts are compared rank by rank.
constexpr int64_t kMostRanksCompared = 4096;

// The common factors of the axes of two meshes with the same number of ranks.
class CommonAxes {
 public:
  // Returns false if the sizes do not divide each other.
  bool cut(const Mesh& src, const Mesh& dst) {
    src_axes.resize(src.sizes.size());
    dst_axes.resize(dst.sizes.size());
    size_t i = 0;
    size_t j = 0;
    int64_t src_rest = 1;
    int64_t dst_rest = 1;
    while (true) {
      while (src_rest == 1 && i < src.sizes.size()) {
        src_rest = src.sizes[i++];
      }
      while (dst_rest == 1 && j < dst.sizes.size()) {
        dst_rest = dst.sizes[j++];
      }
      if (src_rest == 1 && dst_rest == 1) {
        return true;
      }
      const int64_t size = std::min(src_rest, dst_rest);
      if (src_rest % size != 0 || dst_rest % size != 0) {
        return false;
      }
      const auto axis = axis_set(static_cast<int64_t>(sizes.size()));
      sizes.push_back(size);
      src_axes[i - 1] |= axis;
      dst_axes[j - 1] |= axis;
      src_rest /= size;
      dst_rest /= size;
    }
  }

  std::vector<int64_t> sizes;
  std::vector<AxisSet> src_axes;
  std::vector<AxisSet> dst_axes;
};

AxisSet joined(const std::vector<AxisSet>& axes, AxisSet of_view) {
  AxisSet all = 0;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    all |= contains(of_view, static_cast<int64_t>(axis)) ? axes[axis] : 0;
  }
  return all;
}

// Adds the sets of axes that have a group in a view.
void add_groups(const Mesh& view, const std::vector<AxisSet>& axes, Mesh& mesh) {
  const auto add = [&](AxisSet set) {
    if (set != 0 && !mesh.has_group(set)) {
      mesh.merged.push_back(set);
    }
  };
  std::ranges::for_each(axes, add);
  for (const AxisSet merged : view.merged) {
    add(joined(axes, merged));
  }
}

// Returns the coordinate, on a view with these `axes`, of the rank at `coordinate` of the common mesh.
Coordinate on_view(const Mesh& common, const std::vector<AxisSet>& axes, const Coordinate& coordinate) {
  Coordinate viewed(axes.size(), 0);
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    for (int64_t part = 0; part < common.num_axes(); ++part) {
      if (contains(axes[axis], part)) {
        viewed[axis] = viewed[axis] * common.sizes[part] + coordinate[part];
      }
    }
  }
  return viewed;
}

}  // namespace

int64_t view_axis(const std::vector<AxisSet>& axes, size_t axis) {
  const auto found = std::ranges::find(axes, axis_set(static_cast<int64_t>(axis)));
  return found == axes.end() ? -1 : found - axes.begin();
}

std::optional<CommonMesh> common_mesh(const RankedMesh& src, const RankedMesh& dst) {
  CommonAxes axes;
  if (src.ranks != dst.ranks || !axes.cut(src.mesh, dst.mesh)) {
    return std::nullopt;
  }
  CommonMesh common{{std::move(axes.sizes), {}, {}, src.mesh.ranks_per_host},
                    std::move(axes.src_axes),
                    std::move(axes.dst_axes)};
  for (size_t axis = 0; axis < common.mesh.sizes.size(); ++axis) {
    const int64_t of_src = view_axis(common.src_axes, axis);
    const int64_t of_dst = view_axis(common.dst_axes, axis);
    if (of_src < 0 && of_dst < 0) {
      return std::nullopt;
    }
    common.mesh.names.push_back(of_src >= 0 ? src.mesh.name(of_src) : dst.mesh.name(of_dst));
  }
  add_groups(src.mesh, common.src_axes, common.mesh);
  add_groups(dst.mesh, common.dst_axes, common.mesh);
  return common;
}

std::optional<Layout> layout_on_common(const Mesh& common, const std::vector<AxisSet>& axes, const Mesh& view,
                                       const Layout& layout, const std::vector<int64_t>& shape) {
  Layout on_common{std::vector<Placement>(common.sizes.size()), ShardOrder(layout.order.size())};
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    for (int64_t part = 0; part < common.num_axes(); ++part) {
      if (contains(axes[axis], part)) {
        on_common.placements[part] = layout.placements[axis];
      }
    }
  }
  for (size_t dim = 0; dim < layout.order.size(); ++dim) {
    auto& order = on_common.order[dim];
    for (const int64_t axis : layout.order[dim]) {
      for (int64_t part = 0; part < common.num_axes(); ++part) {
        if (contains(axes[axis], part)) {
          order.push_back(part);
        }
      }
    }
    const auto size = shape[dim];
    const bool is_same =
        common.num_ranks() <= kMostRanksCompared &&
        for_all_coordinates(common, order, [&](const Coordinate& coordinate) {
          return local_indices(on_common, common, static_cast<int64_t>(dim), size, coordinate) ==
                 local_indices(layout, view, static_cast<int64_t>(dim), size,
                               on_view(common, axes, coordinate));
        });
    if (!is_same) {
      return std::nullopt;
    }
  }
  while (!on_common.order.empty() && on_common.order.back().empty()) {
    on_common.order.pop_back();
  }
  return on_common;
}

}  // namespace funcol
