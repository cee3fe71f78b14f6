// A mesh of which two meshes of the same ranks are views, so that redistributions between them can be
// planned.
#pragma once

#include <optional>
#include <vector>

#include "planner/transfer.h"

namespace funcol {

// A mesh of which two other meshes are views: each axis of a view is one or several neighboring axes of it.
struct CommonMesh {
  Mesh mesh;  // `merged` has the sets of axes that have a process group in one of the views
  std::vector<AxisSet> src_axes;  // in `mesh`, by axis of the source mesh; none for axes of one rank
  std::vector<AxisSet> dst_axes;

  friend bool operator==(const CommonMesh&, const CommonMesh&) = default;
};

// Returns the common mesh of `src` and `dst`. Returns nullopt unless both have the same ranks in the same
// order, and each axis of the common mesh is an axis of one of them: other axes have no process group.
std::optional<CommonMesh> common_mesh(const RankedMesh& src, const RankedMesh& dst);

// Returns the layout on `common` that equals `layout` on `view`, a view of `common` with these `axes`.
// Returns nullopt if there is none, as for uneven shards along an axis that is several axes of `common`.
std::optional<Layout> layout_on_common(const Mesh& common, const std::vector<AxisSet>& axes, const Mesh& view,
                                       const Layout& layout, const std::vector<int64_t>& shape);

// Returns the axis of a view that is exactly axis `axis` of the common mesh, or -1 if there is none. `axes`
// are the axes of the view.
int64_t view_axis(const std::vector<AxisSet>& axes, size_t axis);

}  // namespace funcol
