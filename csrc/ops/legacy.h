// The operators of c10d_functional: PyTorch's first functional collectives, whose groups are ranks and a tag.
//
// Each becomes the operator of the same name in _c10d_functional, in one boxed kernel for all of them.
// Autograd and tracers therefore see that operator, as they do in PyTorch, where the same is done in Python.
#pragma once

#include <torch/library.h>

#include <string>
#include <vector>

namespace funcol {

// Every operator of c10d_functional by name, those included that only newer PyTorch minors have.
std::vector<std::string> legacy_op_names();

// Defines, with kernels, those that the running PyTorch lacks. PyTorch defines its own when
// torch.distributed._functional_collectives is imported; call this after that, once.
void define_missing_legacy_ops();

// Registers the kernel for all of them in `library`, for a key that the library was made for.
void register_legacy_kernels(torch::Library& library);

}  // namespace funcol
