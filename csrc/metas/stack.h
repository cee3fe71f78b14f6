// The boxed arguments of an operator, made from an OpCall.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

#include "propagation/op_call.h"

namespace funcol {

using MakeTensor = std::function<at::Tensor(const TensorMeta& meta)>;

// The arguments of `op`, with tensors that `make_tensor` makes of call.tensors, and `device` for every
// device. Tensors to write to (out=), which calls leave out, are empty ones.
torch::jit::Stack to_stack(const c10::OperatorHandle& op, const OpCall& call, at::Device device,
                           const MakeTensor& make_tensor);

}  // namespace funcol
