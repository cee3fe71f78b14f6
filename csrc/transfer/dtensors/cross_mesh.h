// Redistribution of DTensors from one mesh to another.
//
// Plans are remembered by value, for this rank. All tensors of a call are on one mesh and go to one other
// mesh; all ranks of both call it alike. On a rank outside of the source mesh a local tensor is an empty one
// of the dtype and device; on a rank outside of the target mesh the result is such a tensor.
//
// Everything here needs the GIL. Before anything is sent: ValueError for local tensors of wrong shapes, for
// meshes that no process group has in common, and if there is no plan; NotImplementedError for placements of
// unknown kinds.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

#include "planner/mesh_change.h"

namespace funcol::python {

struct MeshChangeOptions {
  bool async_op = false;
  std::optional<MeshChangeCosts> models;  // none: the default models of both meshes
  std::optional<int64_t> max_bytes;       // as RedistributionOptions has it
};

// Each DTensor with its tuple of `placements` on `device_mesh`. `order` is a shard order, or None. Null, with
// nothing done, if one of them has masks or symbols as sizes.
py::object change_mesh(const py::list& dtensors, py::handle device_mesh, const py::list& placements,
                       py::handle order, const MeshChangeOptions& options);

// The local tensors of `src_specs` on one mesh, redistributed to `dst_specs` on another one.
py::object change_mesh_of_locals(const py::list& locals, const py::list& src_specs, const py::list& dst_specs,
                                 const MeshChangeOptions& options);

// The value of a DeviceMesh, with its ranks.
RankedMesh to_ranked_mesh(py::handle device_mesh);

}  // namespace funcol::python
