// PyTorch's Python objects for layouts as values: placements, shard orders, device meshes.
//
// Everything here needs the GIL. What is of the wrong type is a TypeError; a kind of placement that funcol
// does not know, such as a subclass of Partial with rules of its own, a NotImplementedError: never taken for
// its base class.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "layout/layout.h"

namespace funcol::python {

// Replicate, Shard, _StridedShard, Partial of any reduction, or _MaskPartial, whose mask is the address of
// its mask_buffer. A Shard's dim is as it was given: make_layout() counts negative ones from 0.
Placement to_placement(py::handle object);

// A sequence of placements, or text such as "S0,R".
std::vector<Placement> to_placements(py::handle object);

// PyTorch's tuple of ShardOrderEntry(tensor_dim, mesh_dims), or pairs of the same. None is the default order:
// empty.
ShardOrder to_shard_order(py::handle object);

// A DeviceMesh, or a funcol._C.Mesh. `merged` names the sets of axes of several ranks that have a process
// group by now: flattened submeshes, and the world where the mesh is the whole of it in the order of its
// ranks. No group is made. Remembered for as long as the DeviceMesh lives, and made again once it has been
// flattened further: the reference is good until the next call for the same object.
const Mesh& to_mesh(py::handle object);

}  // namespace funcol::python
