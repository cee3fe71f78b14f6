// From the arguments of a call to those of the operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

#include "propagation/op_call.h"

namespace funcol {

// The tensor that stands for `call.tensors[number]`.
using StandIn = std::function<at::Tensor(const TensorMeta& meta)>;

// The arguments of `op` with stand-ins for the tensors, on `device` where it asks for one. Tensors to write
// to (out=), which calls leave out, are empty ones.
torch::jit::Stack to_stack(const c10::OperatorHandle& op, const OpCall& call, at::Device device,
                           const StandIn& stand_in);

}  // namespace funcol
