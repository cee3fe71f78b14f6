// Operators whose elements depend on the elements at the same place, as broadcasting pairs them.
#pragma once

#include "propagation/rules/rows.h"

namespace funcol {

// A row for each dim of what the operands broadcast to: an operand that lacks the dim, or repeats its only
// index, is replicated. Tensors that are no operands (a learning rate, a count of steps) are replicated, and
// so are outputs of another shape.
void add_broadcast_rows(const OpCall& call, RowList& rows);

// What a family of pointwise operators may do with partials; none where null.
using PartialRows = std::function<void(const OpCall&, RowList&)>;
Rule pointwise(PartialRows partial_rows = nullptr);

}  // namespace funcol
