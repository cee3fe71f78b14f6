// Moves of a tensor to one rank of its mesh, or to every rank, which then holds the whole, and back.
//
// Everything here needs the GIL, which is the lock of the cache, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transfer/bundle.h"
#include "transfer/dtensors/redistributions.h"

namespace funcol::python {

constexpr int64_t kEveryRank = -1;
constexpr int64_t kNoRank = -2;

// The key of such a move.
struct RankTransferKey {
  uint64_t mesh_id = 0;
  Layout layout;  // of the shards, as given: an empty order is the default one
  std::vector<int64_t> shape;
  int64_t itemsize = 0;
  int64_t holder = 0;       // the number of the rank in the mesh, whose last axis counts first; kEveryRank
  bool is_back = false;     // from the holder to the shards
  bool is_for_all = false;  // by a group of all ranks, so that moves to all holders share a collective

  size_t hash() const;
  bool is_on(uint64_t id) const { return id == mesh_id; }
  size_t heap_bytes() const { return funcol::heap_bytes(layout) + funcol::heap_bytes(shape); }
  friend bool operator==(const RankTransferKey&, const RankTransferKey&) = default;
};

// The move of `local` as an item, on a rank inside the mesh. Partials are reduced first. Where no group has
// just the ranks that hold shards, or all ranks of the mesh, tensors go to and from one rank point to point
// within the default group. ValueError if the layout contradicts itself.
BatchItem item_of_move(const RankTransferKey& key, py::handle device_mesh, KnownMesh& known,
                       at::Tensor local);

// The most that the move takes on a rank of the mesh, from its start until the whole is taken out of its
// buffer. The same on all ranks, those outside of the mesh included.
int64_t bytes_of_move(const RankTransferKey& key, const Mesh& mesh, bool is_on_cpu);

// The number of the rank at `coordinate`, as RankTransferKey has it.
int64_t number_in_mesh(const Coordinate& coordinate, const Mesh& mesh);

}  // namespace funcol::python
