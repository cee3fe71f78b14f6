// Moves of a tensor to one rank of its mesh, or to every rank, which then holds the whole, and back.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>

#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

// Makes programs of moves to TransferKey::holder or from it, on a rank inside of `device_mesh`. Partials are
// reduced first. Where no group has just the ranks that hold shards, or all ranks of the mesh, tensors go to
// and from one rank point to point within the default group. ValueError if the layout contradicts itself.
MakeProgram to_or_from_rank(py::handle device_mesh, KnownMesh& known);

// The most that the move takes on a rank of the mesh, from its start until the whole is taken out of its
// buffer. The same on all ranks, those outside of the mesh included.
int64_t bytes_of_move(const TransferKey& key, const Mesh& mesh, bool is_on_cpu);

// The number of the rank at `coordinate`, as TransferKey::holder has it.
int64_t number_in_mesh(const Coordinate& coordinate, const Mesh& mesh);

}  // namespace funcol::python
