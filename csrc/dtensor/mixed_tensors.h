// Plain tensors beside DTensors, as arguments of one operator.
//
// PyTorch takes a plain tensor of one number for a replicated DTensor, and all others under
// implicit_replication(). It refuses the rest by an error that names neither the argument nor a remedy.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/PyInterpreter.h>

namespace funcol::python {

// Calls `table.dispatch(op, stack)`. Where PyTorch refuses plain tensors, raises a RuntimeError, as PyTorch
// does, that names them:
//
//   param.mul(torch.eye(4))  ->  funcol: aten.mul.Tensor: got mixed torch.Tensor and DTensor: `other`, of
//                                shape [4, 4], is a plain tensor. Make it a DTensor: by distribute_tensor(...
//
// Needs no GIL.
void dispatch_naming_plain_tensors(const c10::impl::PyInterpreterVTable& table, const c10::OperatorHandle& op,
                                   torch::jit::Stack* stack);

}  // namespace funcol::python
