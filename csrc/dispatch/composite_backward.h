// The backward pass of composite operators on DTensors: see composites.h.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "dispatch/composite_call.h"
#include "dispatch/trace.h"

namespace funcol::python {

using CompositeInputs = c10::SmallVector<at::Tensor, 4>;

// Makes the node of `result`, which computes the gradients of `inputs`, the DTensors among the arguments.
// `arguments` has None in their place; `values` are the local tensors that `kept` lists.
void record_backward(const CompositePtr& composite, std::shared_ptr<const Kept> kept,
                     std::vector<c10::IValue> arguments, const CompositeInputs& inputs,
                     Program::Locals values, const at::Tensor& result);

}  // namespace funcol::python
