// Composite operators on DTensors, each in one call with one autograd node.
//
// PyTorch runs `linear` on DTensors as t, view, mm and view, each on wrapper tensors and each with an
// autograd node. Kernels at PythonTLSSnapshot, a key that only wrapper tensors have, intercept the call
// first. The first call with certain specs runs as PyTorch runs it, and is traced; later ones run the trace's
// program on local tensors and wrap its result. The node's first backward pass with a certain layout of the
// gradient repeats the forward pass with PyTorch's own derivatives and traces these, so that values and
// gradients are bitwise equal.
//
// Anything unusual takes PyTorch's path: modes, transforms, autocast, inference mode, forward-mode gradients,
// hooks on saved tensors, plain tensors beside DTensors, random numbers, operands that have to move.
//
// Everything here needs the GIL.
#pragma once

namespace funcol::python {

// Registers the kernels. They handle calls while native operators are installed.
void install_composites();
void remove_composites();

}  // namespace funcol::python
