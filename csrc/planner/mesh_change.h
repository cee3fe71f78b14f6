// The least-cost plan that moves a tensor from one mesh to another.
//
// Three kinds of plans are compared:
//   - A transfer (transfer.h), after partial values were reduced on the source mesh: to the full
//   tensor, or to shards.
//   - The same to shards of what ranks of the target mesh replicate, and gathers there: for few senders and
//     many replicas, and where memory is bounded.
//   - A redistribution on a mesh of which both meshes are views, if they have the same ranks in the same
//     order, and if no rank sends more in it than the busiest rank has to.
//
// Worked case, S(0)S(1) on {dp: 4, tp: 2} -> S(0) on {tp: 8} of the same ranks: both are views of 4 x 2
// ranks, on which the target is S(0)S(0). One all_to_all over tp, among 2 ranks, costs less than one among 8.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/common_mesh.h"
#include "planner/plan.h"
#include "planner/search.h"
#include "planner/transfer.h"

namespace funcol {

// A plan between meshes. Its parts run in this order; an absent part has no work.
struct MeshChange {
  MeshChangeTask task;
  std::optional<CommonMesh> common;  // of `before`, which then is all of the plan
  std::optional<Plan> before;        // on the source mesh
  std::optional<Transfer> transfer;
  std::optional<Plan> after;  // on the target mesh
  double cost = 0;
  int64_t peak_bytes = 0;

  friend bool operator==(const MeshChange&, const MeshChange&) = default;
};

// The cost models of both meshes, of the same kind.
struct MeshChangeCosts {
  CostModel src;
  CostModel dst;
};

// Returns the least-cost plan, the same on every rank. A transfer costs as much as a permute over all axes of
// the slower mesh with the bytes of the busiest sender or receiver.
//
// Throws std::invalid_argument if no plan fits `max_bytes`, and what plan_redistribution() throws. Masked
// partials have to be reduced first.
MeshChange plan_mesh_change(const MeshChangeTask& task, const MeshChangeCosts& models,
                            std::optional<int64_t> max_bytes = std::nullopt);

// Returns the bytes of all parts together by sender and receiver, both as places in all_ranks(change.task).
// An all_reduce counts as a reduce_scatter and an all_gather.
std::vector<std::vector<int64_t>> bytes_matrix(const MeshChange& change);

// Returns the least bytes that the busiest rank sends in any plan that moves each element to each rank that
// lacks it. Returns nullopt if values are partial: the bytes that their reduction sends depend on the
// backend.
std::optional<int64_t> least_busiest_bytes(const MeshChangeTask& task);

// Formats a change: "P(sum)S(0)->RS(0) | RS(0) => S(1) | S(1)->R".
std::string to_string(const MeshChange& change);

}  // namespace funcol
