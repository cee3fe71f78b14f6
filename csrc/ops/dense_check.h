// The check that tensors are dense, as collectives need them.
#pragma once

#include <ATen/core/Tensor.h>

namespace funcol {

// NotImplementedError if a tensor is sparse, quantized, nested or in a layout of a library's own: a backend
// would take such memory for numbers.
void check_dense(at::TensorList tensors, const char* op);

}  // namespace funcol
