// Metas of pointwise operators' results without Meta kernels, many of which are written in Python and take
// hundreds of microseconds.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

#include "propagation/op_call.h"

namespace funcol {

// For an operator with PyTorch's tag `pointwise` that returns one tensor, draws no random numbers, and takes
// neither `out` nor a memory format: the sizes and strides that TensorIterator gives the result, and the
// dtype of the operator's result for tensors of one element; in place, the meta of the tensor that it writes
// to. Returns nullopt for any other operator, or if it does not run on such tensors.
std::optional<TensorMeta> pointwise_meta(const c10::OperatorHandle& op, const OpCall& call);

}  // namespace funcol
