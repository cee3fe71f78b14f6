// CPU and Meta tensors in place of CUDA tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>

namespace simulated_gpu::aten {

// The memory of a CUDA tensor as a CPU tensor of the same sizes, strides and bits, which owns nothing: the
// stream's order keeps the memory, as it does for a kernel. Other tensors are returned as they are.
//
// An error where the tensor is not strided, or where its storage is smaller than its sizes say, as after
// untyped_storage().resize_(0): a GPU would read foreign memory.
at::Tensor cpu_alias(const at::Tensor& tensor);

// cpu_alias() of a CUDA tensor; a copy of any other, which the host may change before a stream reads it. A
// kernel has such numbers among its parameters.
at::Tensor kernel_argument(const at::Tensor& tensor);

// A Meta tensor of the same sizes, strides and bits. Numbers of the CPU are returned as they are.
at::Tensor meta_like(const at::Tensor& tensor);

// An uninitialized CUDA tensor of the sizes and strides of `shape`.
at::Tensor empty_on(at::Device device, const at::Tensor& shape);

// The value with `map` applied to each tensor, in lists too; other values are returned as they are.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map);

// Calls `use` with each tensor of the value that is defined.
void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& use);

}  // namespace simulated_gpu::aten
