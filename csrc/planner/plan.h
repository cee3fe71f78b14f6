// A redistribution plan as data: the layouts at both ends and the steps between them.
//
// A plan is the same for every rank of the mesh. The sizes of one rank follow from the layouts before and
// after a step (layout/shards.h). Worked case, (8, 8) float32 on {dp: 2, tp: 4}, "S0,S1" -> "R,S1": one step,
// all_gather of dim 0 over dp, before S(0)S(1), after RS(1).
#pragma once

#include <string>
#include <vector>

#include "layout/layout.h"
#include "planner/cost_model.h"

namespace funcol {

struct Step {
  StepKind kind;
  AxisSet axes = 0;  // the collective runs in groups of ranks that differ on these axes alone
  Layout before;
  Layout after;
  std::vector<int64_t> logical_shape;  // of the tensor that the first rank's group holds together
  double cost = 0;
  int64_t bytes_sent = 0;  // by the busiest rank
  int64_t peak_bytes = 0;  // the most memory that a rank holds during the step, with the plan's source tensor

  friend bool operator==(const Step&, const Step&) = default;
};

struct Plan {
  Mesh mesh;
  std::vector<int64_t> shape;  // of the full tensor
  int64_t itemsize = 1;        // bytes of an element
  Layout src;
  Layout dst;
  std::vector<Step> steps;
  double cost = 0;
  int64_t peak_bytes = 0;

  friend bool operator==(const Plan&, const Plan&) = default;
};

// Formats a step: "all_gather(dim 0, dp)", "all_to_all(dim 0 -> 1, dp+tp)", "split(dim 1, tp)",
// "all_reduce(sum, tp)".
std::string to_string(const Step& step, const Mesh& mesh);

// Formats a plan in PyTorch's arrow notation: "S(0)R->RR". "-->" is a step over several axes.
std::string to_string(const Plan& plan);

// Returns the shape of the tensor that the ranks along `axes` hold together, for the rank at `coordinate`:
// `shape` cut by all other axes of `layout`.
std::vector<int64_t> logical_shape(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                                   AxisSet axes, const Coordinate& coordinate);

}  // namespace funcol
