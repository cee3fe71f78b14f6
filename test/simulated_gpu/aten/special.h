// Kernels for which the CPU's own one would not do.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

namespace simulated_gpu::aten {

// aten::native_dropout: the CPU's kernel takes its numbers from the CPU's default generator.
torch::jit::Stack dropout(torch::jit::Stack arguments, const at::Generator& generator);

}  // namespace simulated_gpu::aten
