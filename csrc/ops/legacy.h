// The operators of c10d_functional: PyTorch's first functional collectives, whose groups are ranks and a tag.
//
// One boxed kernel turns each into _c10d_functional's operator of the same name. Autograd and tracers see
// that operator, as they do in PyTorch, where Python does this.
#pragma once

#include <torch/library.h>

#include <string>
#include <vector>

namespace funcol {

// The names of all operators of c10d_functional, also of those that only newer PyTorch minors have.
std::vector<std::string> legacy_op_names();

// Defines the operators that the running PyTorch lacks, with kernels. To be called once, after PyTorch has
// defined its own, which it does when torch.distributed._functional_collectives is imported.
void define_missing_legacy_ops();

// Registers the kernel of all operators in `library`, for the library's dispatch key.
void register_legacy_kernels(torch::Library& library);

}  // namespace funcol
