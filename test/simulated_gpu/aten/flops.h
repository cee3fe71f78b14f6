// How much arithmetic an operator asks for.
#pragma once

#include <ATen/core/stack.h>

#include <string>

#include "simulated_gpu.h"

namespace simulated_gpu::aten {

// Adds the floating point operations of a matrix product, and their type. Other operators ask for bytes of
// memory rather than for arithmetic, and add nothing.
//
//   aten::addmm(bias, (4, 8), (8, 16)) of floats: 2 * 4 * 8 * 16 operations of "Float"
void add_flops(const std::string& name, const torch::jit::Stack& arguments, Amount& amount);

// Returns true for a product of matrices of two dtypes, which the kernel refuses and Meta does not.
bool multiplies_two_dtypes(const std::string& name, const torch::jit::Stack& arguments);

}  // namespace simulated_gpu::aten
