// Programs of redistributions from one mesh to another.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "planner/mesh_change.h"
#include "pyobjects/meshes.h"
#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

// Returns a maker of programs of redistributions from `src_mesh` to `dst_mesh`, whose key has both. On a rank
// outside of the first mesh a local tensor is an empty one of the dtype and device; on a rank outside of the
// second the result is. All objects must outlive the maker. Raises ValueError for meshes that no process
// group has in common; the maker raises it if there is no plan. Needs the GIL.
MakeProgram between_meshes(py::handle src_mesh, KnownMesh& src, py::handle dst_mesh, KnownMesh& dst);

// Returns the value of a DeviceMesh, with its ranks.
RankedMesh to_ranked_mesh(py::handle device_mesh);

}  // namespace funcol::python
