// Kinds of tensors that collectives carry: dense ones.
#pragma once

#include <ATen/core/Tensor.h>

namespace funcol {

// NotImplementedError unless all tensors are dense: not sparse, quantized, nested or in a layout of a
// library's own, whose memory a backend would take for numbers.
void check_dense(at::TensorList tensors, const char* op);

}  // namespace funcol
