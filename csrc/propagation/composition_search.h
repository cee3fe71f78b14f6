// The search for the cheapest composition: one row of the rule for each mesh axis, priced by the
// redistributions of the inputs.
//
// Worked case, mm. On two axes with inputs "S0,R" and "R,S1" no input has to move; the result is "S0,S1", and
// nothing is priced. On one axis with inputs "S0" and "S0", the row P <- S1,S0 moves the first input by an
// all_to_all, the row S0 <- S0,R moves the second by an all_gather, and so on; the cheapest composition wins.
#pragma once

#include <optional>
#include <vector>

#include "planner/search_pool.h"
#include "propagation/rule.h"

namespace funcol {

// An input of the call in its present layout.
struct Operand {
  Layout source;           // as make_layout() returns it
  bool is_pinned = false;  // the operator writes to it, so it cannot move
};

struct PricedComposition {
  Composition composition;
  std::vector<double> costs;  // of each input's redistribution
  bool moves = false;         // whether any input moves
};

// Rows. The row of Replicates alone comes first, then the rows of the rule in their order. A row with
// any_shard() stands once for plain shards and once for each split factor in the operands' layouts. Rows that
// shard a dim which a tensor does not have are skipped.
//
// Shard orders. All tensors of a composition are cut by their axes in one order. The mesh order is tried
// first. If operands or `required` layouts have other orders, these are tried too: first the order that
// agrees with all of them, if there is one, then the order of each.
//
// A composition is legal if
//
// - every Partial of an input is already there, or is made of Replicate. Plans could also make it of shards
//   and other partials, but the result would need a reduction, whose cost is not counted here;
// - no tensor has partials that do not commute, or masks on two axes;
// - every rank holds a part of each sharded input, unless rows.allows_empty_shards;
// - pinned operands keep their layouts;
// - each output has its `required` layout (nullopt: any layout; an empty list: any layouts);
// - rows.is_legal accepts it.

// Returns the preferred legal composition:
//
// 1. the first one in which no input moves;
// 2. else the one of the least total cost of all inputs. Of equals the first in the order of the full product
//    wins: by the row of the first axis, then of the next axis, ..., then by the shard order.
// Returns nullopt if no composition is legal or reachable (a masked partial cannot stay while its tensor
// changes). `costs` prices redistributions on the mesh of the call.
//
// row_search.h searches. The bound of a node is the sum, over the inputs, of the least cost of a layout that
// any rows of the other axes need. Redistributions are priced only until the cheapest composition is certain.
//
// Thread-safe, also with a shared `costs`. Throws std::invalid_argument, naming the operator, if rows,
// operands or `required` do not match the number of tensors of the call, or layouts do not match the mesh.
std::optional<PricedComposition> cheapest_composition(const OpCall& call, const Rows& rows,
                                                      const std::vector<Operand>& operands,
                                                      const std::vector<std::optional<Layout>>& required,
                                                      SearchPool& costs);

// Returns all legal compositions in the order of the full product. The cost of an input that cannot reach its
// layout is kImpossible.
std::vector<PricedComposition> legal_compositions(const OpCall& call, const Rows& rows,
                                                  const std::vector<Operand>& operands,
                                                  const std::vector<std::optional<Layout>>& required,
                                                  SearchPool& costs);

}  // namespace funcol
