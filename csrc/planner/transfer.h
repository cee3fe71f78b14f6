// The move of a tensor from the ranks of one mesh to those of another, as data: the elements that each rank
// sends to each other rank. The meshes may have the same ranks, some in common, or none.
//
// Every rank that wants elements and does not hold them receives each of them once, from a rank that holds
// it.
//
// Balance: only the ranks that hold a block can send it. They share its requested elements equally, to an
// element, so that the busiest of n ranks sends ceil(requested / n) elements. In no plan that sends each
// element to each receiver does the busiest sender send less.
//
// Worked case, 8 elements, R on ranks 0 1 -> S(0) on ranks 1 2 3 4: rank 1 holds its 0 1. The other six
// elements are sent: rank 0 sends 2 3 to rank 2 and 4 to rank 3; rank 1 sends 5 to rank 3 and 6 7 to rank 4.
//
// Cost, in time and memory, on meshes of n ranks: O(n) for plan_transfer(), O(n) and the messages of the rank
// for messages_of(). Plain shards are assumed; each piece of a strided shard counts as a shard.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/shards.h"

namespace funcol {

// A mesh and the numbers of its ranks in the world, in row-major order of coordinates.
struct RankedMesh {
  Mesh mesh;
  std::vector<int64_t> ranks;

  friend bool operator==(const RankedMesh&, const RankedMesh&) = default;
};

// A full tensor, its source and its target. Layouts are as make_layout() returns them.
struct MeshChangeTask {
  RankedMesh src_mesh;
  Layout src;
  RankedMesh dst_mesh;
  Layout dst;
  std::vector<int64_t> shape;
  int64_t itemsize = 1;

  friend bool operator==(const MeshChangeTask&, const MeshChangeTask&) = default;
};

// Elements begin, begin + 1, ... of a box in row-major order. The box is all that the sender holds and the
// receiver wants.
struct TransferMessage {
  int64_t sender = 0;
  int64_t receiver = 0;
  std::vector<Intervals> indices;  // of the box in the full tensor, by dim, ascending
  int64_t begin = 0;
  int64_t size = 0;

  friend bool operator==(const TransferMessage&, const TransferMessage&) = default;
};

struct TransferLoads {
  int64_t total = 0;             // bytes sent by all ranks
  int64_t busiest_sender = 0;    // the most bytes that one rank sends
  int64_t busiest_receiver = 0;  // receives
  int64_t busiest_copier = 0;    // packs, unpacks and keeps
  int64_t peak = 0;              // the most memory: the tensors before and after, and what travels
  // The least that the busiest sender of any plan sends, if each receiver gets every element that it lacks
  // once.
  int64_t bound = 0;

  friend bool operator==(const TransferLoads&, const TransferLoads&) = default;
};

struct Transfer {
  MeshChangeTask task;
  TransferLoads loads;

  friend bool operator==(const Transfer&, const Transfer&) = default;
};

// Returns the transfer, the same on every rank. Throws std::invalid_argument, with a text that begins with
// "plan_transfer", if a layout has partial values, which have to be reduced first, or if the ranks of a mesh
// do not fit its sizes.
Transfer plan_transfer(MeshChangeTask task);

struct TransferMessages {
  std::vector<TransferMessage> sent;  // by sender, receiver: at most one for two ranks
  std::vector<TransferMessage> kept;  // by rank: boxes that a rank holds and wants, "sent" by it to itself

  friend bool operator==(const TransferMessages&, const TransferMessages&) = default;
};

// Returns the messages that one rank sends or receives, or those of all ranks. Throws like plan_transfer().
TransferMessages messages_of(const MeshChangeTask& task, int64_t rank);
TransferMessages all_messages(const MeshChangeTask& task);

// Returns the indices of a tensor under `layout` that `rank` of `mesh` holds, by dim; nullopt on other ranks.
std::optional<std::vector<Intervals>> indices_at(const RankedMesh& mesh, const Layout& layout,
                                                 const std::vector<int64_t>& shape, int64_t rank);

// Returns the ranks of both meshes, ascending.
std::vector<int64_t> all_ranks(const MeshChangeTask& task);

// Returns the bytes of all messages by sender and receiver, both as places in all_ranks().
std::vector<std::vector<int64_t>> bytes_matrix(const Transfer& transfer);

// Formats each message as a line: "0 -> 3: 16 B of [0:4, 8:12]", "1 -> 3: 4 B of [0:2], from element 1".
std::string to_string(const Transfer& transfer);

}  // namespace funcol
