// Plain tensors beside DTensors, as arguments of one operator.
//
// PyTorch treats a plain tensor with one element as a replicated DTensor, and under implicit_replication()
// every plain tensor. Otherwise it raises an error that names neither the argument nor a remedy.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// Returns the spec of a plain tensor that is replicated on `mesh`. Needs the GIL.
py::object spec_of_plain(const at::Tensor& tensor, py::handle mesh);

// Returns true if all elements of `tensors` are DTensors on equal meshes, or none is a DTensor. None and
// other objects count as plain tensors. Needs the GIL.
bool are_on_one_mesh(py::handle tensors);

// Calls `table.dispatch(op, stack)`. If PyTorch rejects plain tensors, raises a RuntimeError, as PyTorch
// does, that names them:
//
//   param.mul(torch.eye(4))  ->  funcol: aten.mul.Tensor: got mixed torch.Tensor and DTensor: `other`, of
//                                shape [4, 4], is a plain tensor. Make it a DTensor: by distribute_tensor(...
//
// Under implicit_replication(), calls whose only DTensor is a keyword argument, such as `out`, run with
// replicated DTensors instead of the plain tensors.
//
// Does not need the GIL.
void dispatch_naming_plain_tensors(const c10::impl::PyInterpreterVTable& table, const c10::OperatorHandle& op,
                                   torch::jit::Stack* stack);

}  // namespace funcol::python
