// Moves of a tensor to one rank of its mesh, or to every rank, which then holds the full tensor, and back.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>

#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

// Returns a maker of programs that move a tensor to TransferKey::owner or from it, on a rank inside of
// `device_mesh`. Partials are reduced first. If no group has just the ranks that hold shards, or all ranks of
// the mesh, tensors go point to point within the default group. The maker raises ValueError if the layout
// contradicts itself.
MakeProgram to_or_from_rank(py::handle device_mesh, KnownMesh& known);

// Returns the most bytes that the move takes on a rank of the mesh, from its start until the full tensor is
// taken out of its buffer. The same on all ranks, including those outside of the mesh.
int64_t bytes_of_move(const TransferKey& key, const Mesh& mesh, bool is_on_cpu);

}  // namespace funcol::python
