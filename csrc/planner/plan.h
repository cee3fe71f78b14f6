// A redistribution as data: from which layout to which, by which steps.
//
// A plan is the same for every rank of the mesh; what a step means for one rank's sizes follows from the
// layouts before and after it (layout/shards.h). Worked case, (8, 8) float32 on {dp: 2, tp: 4}, "S0,S1" ->
// "R,S1": one step, all_gather of dim 0 over dp, before S(0)S(1), after RS(1).
#pragma once

#include <string>
#include <vector>

#include "layout/layout.h"
#include "planner/cost_model.h"

namespace funcol {

struct Step {
  StepKind kind;
  AxisSet axes = 0;  // the collective runs among ranks that differ on these axes alone
  Layout before;
  Layout after;
  std::vector<int64_t>
      logical_shape;  // the tensor that the group of the axes holds together, seen by the first rank
  double cost = 0;
  int64_t bytes_sent = 0;  // by the busiest rank
  int64_t peak_bytes = 0;  // the most memory that a rank holds during the step, the plan's source included

  friend bool operator==(const Step&, const Step&) = default;
};

struct Plan {
  Mesh mesh;
  std::vector<int64_t> shape;  // of the whole tensor
  int64_t itemsize = 1;        // bytes of an element
  Layout src;
  Layout dst;
  std::vector<Step> steps;
  double cost = 0;
  int64_t peak_bytes = 0;

  friend bool operator==(const Plan&, const Plan&) = default;
};

// "all_gather(dim 0, dp)", "all_to_all(dim 0 -> 1, dp+tp)", "split(dim 1, tp)", "all_reduce(sum, tp)".
std::string to_string(const Step& step, const Mesh& mesh);

// PyTorch's arrow notation: "S(0)R->RR"; "-->" stands before what several axes do at once.
std::string to_string(const Plan& plan);

// The shape of the tensor that the ranks along `axes` hold together, for the rank at `coordinate`: what is
// left of `shape` when every axis of `layout` but these has cut it.
std::vector<int64_t> logical_shape(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                                   AxisSet axes, const Coordinate& coordinate);

}  // namespace funcol
