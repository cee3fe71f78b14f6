// From rows of one mesh axis to layouts on all axes: the composition that is cheapest to get the inputs to.
//
// Worked case, mm on two axes: of "S0,R" and "R,S1" nothing has to move, the result is "S0,S1", unpriced. Of
// "S0" and "S0" on one axis "P <- S1,S0" moves the first by an all_to_all, "S0 <- S0,R" the second by an
// all_gather,
// ...: the cheapest wins.
#pragma once

#include <optional>
#include <vector>

#include "planner/cost_source.h"
#include "propagation/rule.h"

namespace funcol {

// An input as the caller has it.
struct Operand {
  Layout source;       // as make_layout() returns it
  bool stays = false;  // it is written to, and cannot move
};

struct Choice {
  Composition composition;
  std::vector<double> costs;  // of redistributing each input from where it is
  bool moves = false;         // some input
};

// Rows and compositions. The row of Replicates alone comes first, the others in their order, those with
// any_shard() once plain and then once for each split factor among the operands' sources. Rows that shard a
// dim that a tensor does not have are passed over. All tensors of a composition are cut by their axes in one
// order: the mesh's; where sources, or `required` layouts, are cut in others, also in those: first the one
// that all of them agree with, if there is one, then that of each.
//
// A composition is legal if
//   - partials of inputs stay or are made of a Replicate: a plan could make them of shards and of other
//     partials, but what that saves is paid for when the result is reduced, which no cost here tells;
//   - no tensor mixes partials that do not commute, or has masks on two axes: what one axis masks, the other
//     would have to know of;
//   - every rank has something of each input that is sharded, unless rows.allows_empty_shards;
//   - operands that stay have the layouts that they have;
//   - each output has the layout that is `required` of it (nothing: any; an empty list: nothing is required);
//   - rows.is_legal says so.

// The legal composition that is preferred:
//   1. the first of those in which no input moves;
//   2. that of the least cost, the costs of all inputs summed up; of equals the first in the order of the
//      full product: by the row of the first axis, then of the next, ..., then by the order of cuts.
// Nothing if no composition is legal, or none can be reached (a masked partial that stays while its tensor
// changes). `costs` prices redistributions of whole tensors on the mesh of the call.
//
// Best first: a node has rows for the axes up to some axis; its bound is the sum, over the inputs, of the
// least cost of what any rows of the other axes ask of that input. Nodes are opened, and redistributions
// priced, only as far as needed to know which is the least.
//
// Safe against several threads, also with one `costs`. Throws std::invalid_argument naming the operator if
// rows, operands or `required` are not as many as its tensors, or layouts not of this mesh.
std::optional<Choice> cheapest(const OpCall& call, const Rows& rows, const std::vector<Operand>& operands,
                               const std::vector<std::optional<Layout>>& required, CostSource& costs);

// All legal compositions in the order of the full product; a cost is infinity where an input has no way.
std::vector<Choice> all_choices(const OpCall& call, const Rows& rows, const std::vector<Operand>& operands,
                                const std::vector<std::optional<Layout>>& required, CostSource& costs);

}  // namespace funcol
