// Redistribution of many tensors at once, within a mesh or from one mesh to another: tensors whose plans have
// the same steps share their collectives.
//
// Plans are cached by value, for this rank. All tensors of a call are on one mesh, and all ranks of that mesh
// and of the target mesh must make the same call. `options` holds for all tensors, and its bound for the sum
// of tensors that share a collective.
//
// Everything here needs the GIL. Errors are raised before anything is sent: ValueError for local tensors of
// wrong shapes, for meshes that no process group has in common, and if there is no plan; NotImplementedError
// if the tensors are on different meshes, and for placements of unknown kinds.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

// Redistributes the local tensors of `src_specs` to `dst_specs`, without masks if those are on another mesh.
// The lists have one length. On a rank outside of the mesh local tensors stay as they are; between meshes,
// see between_meshes(). An active DebugMode of PyTorch notes each redistribution within a mesh, and then the
// operators of all; `is_explicit` means that the program requested them.
py::list redistribute_locals(const py::list& locals, const py::list& src_specs, const py::list& dst_specs,
                             const RedistributionOptions& options, bool is_explicit);

// Redistributes each DTensor to its tuple of `placements` on `device_mesh`, or on its own mesh if that is
// None. `order` is a shard order, or None. Returns null, with nothing done, if a DTensor has symbolic sizes
// or masks: those go one by one. Returns None, with nothing done, if a layer of PyTorch observes operators.
py::object redistribute_many(const py::list& dtensors, py::handle device_mesh, const py::list& placements,
                             py::handle order, const RedistributionOptions& options);

}  // namespace funcol::python
