// Fused attention, by the CPU's kernels for it, with the results that CUDA's operators have.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

namespace simulated_gpu::aten {

// Host kernels (operators.h) of _scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention
// and their gradients. Dropout is an error.
torch::jit::Stack flash_attention(torch::jit::Stack arguments, const at::Generator& generator);
torch::jit::Stack flash_attention_backward(torch::jit::Stack arguments, const at::Generator& generator);
torch::jit::Stack efficient_attention(torch::jit::Stack arguments, const at::Generator& generator);
torch::jit::Stack efficient_attention_backward(torch::jit::Stack arguments, const at::Generator& generator);

}  // namespace simulated_gpu::aten
