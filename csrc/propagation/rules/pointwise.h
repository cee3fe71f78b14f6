// Pointwise operators: an element depends on the elements at the same indices of the broadcast operands.
#pragma once

#include "propagation/rules/row_list.h"

namespace funcol {

// Adds a row for each dim of the shape to which the operands are broadcast. Operands that lack or repeat the
// dim are replicated, as are outputs of another shape and tensors that are not operands (a learning rate).
void add_broadcast_rows(const OpCall& call, RowList& rows);

// Adds the rows of an operator that writes the number `value` over elements of self.
void add_filled_partials(const OpCall& call, RowList& rows);

// A function that adds the rows with partials of a family of pointwise operators.
using PartialRows = std::function<void(const OpCall&, RowList&)>;
// Returns the rule of a family, which has no rows with partials if `partial_rows` is null.
Rule pointwise(PartialRows partial_rows = nullptr);

}  // namespace funcol
