// In-place and out= forms, sends, receives and waits, which autograd and layers see as PyTorch's operators.
//
// Compilers, exporters and debug modes know PyTorch's _c10d_functional operators, and so does autograd. Where
// a layer is at work or an input needs a gradient, an operator becomes _c10d_functional's of the same name,
// followed by wait_tensor where funcol's returns a pending tensor.
#pragma once

#include "ops/operator.h"

namespace funcol {

// Registers the kernel that forwards `op`: for the Autograd keys, and as the decomposition that modes ask
// for.
void forward_to_core(Operator& op);

// A collective that writes into its arguments and returns them. As in PyTorch they are plain tensors, whose
// Work is in PyTorch's registry until wait_tensor takes it.
Operator in_place(const OperatorInfo& info, const StartFromStack& start);

}  // namespace funcol
