// Operators of _c10d_functional that a program gave kernels of its own, by torch.library for one.
//
// While there are any, collectives go where they go under a layer (layers.h): through PyTorch's operators, so
// that what the program registered is called. Results may be pending nevertheless.
#pragma once

namespace funcol {

// Whether a program replaced kernels, from now on.
void set_ops_are_replaced(bool are_replaced);

// A layer in the strict sense is active on this thread, which has to see waits and views too.
bool has_watching_layers();

}  // namespace funcol
