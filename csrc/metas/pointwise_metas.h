// What pointwise operators return, without their Meta kernels: many of those are written in Python and take
// hundreds of microseconds.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

#include "propagation/op_call.h"

namespace funcol {

// Of an operator with PyTorch's tag `pointwise` that returns one tensor, writes to none, and takes no memory
// format: the sizes and strides that TensorIterator gives the result, and the dtype that the operator returns
// for tensors of one element. Nothing for any other operator, and where it does not run on such tensors.
std::optional<TensorMeta> pointwise_meta(const c10::OperatorHandle& op, const OpCall& call);

}  // namespace funcol
