// Neutral elements of reductions: 0 for a sum, the largest number for a minimum.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include "layout/placement.h"

namespace funcol {

// Returns the x for which op(x, y) == y for every y of this dtype. For bools "sum" and "product" are "or" and
// "and". Raises TypeError for minima and maxima of complex numbers. Callers never pass avg, which has none.
c10::Scalar neutral_element(PartialOp op, c10::ScalarType dtype);

}  // namespace funcol
