// Selects a box of a tensor, by operators that every layer of PyTorch sees.
#pragma once

#include <ATen/core/Tensor.h>

#include "transfer/exchange_plan.h"

namespace funcol {

// Returns the box of `tensor`: a view if each dim takes one run of positions, else a copy.
at::Tensor select(const at::Tensor& tensor, const Selection& selection);
// Returns true if select() copies.
bool select_copies(const Selection& selection);

}  // namespace funcol
