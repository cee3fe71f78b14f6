// funcol under PyTorch's own operators.
//
// PyTorch registers its kernels of _c10d_functional, _c10d_functional_autograd and c10d_functional for keys
// that represent many devices at once; the dispatcher prefers a kernel for one device. install_core_kernels()
// registers such kernels for CPU and CUDA; remove_core_kernels() removes them, which brings back PyTorch's.
// The rest of the operators does not change: autograd, fake and functional tensors, tracing and the shapes on
// Meta remain PyTorch's.
//
// The kernels have PyTorch's semantics: results are plain tensors whose Work is in PyTorch's registry until
// wait_tensor takes it. So code that Inductor generated runs on them, and works that were registered by
// either side can be waited for by the other.
//
// The dispatcher does not guard its tables against calls that run while they change. Call both functions with
// the GIL, one at a time: they keep it, so that no Python thread enters an operator meanwhile, and wait a
// millisecond, in which threads that have entered an operator reach their kernel.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace funcol {

// Registers the kernels, if they are not installed. Leaves the operators `excluded`, given by their qualified
// names, as they are.
void install_core_kernels(const std::vector<std::string>& excluded);
// Removes the kernels, if they are installed.
void remove_core_kernels();

// Defines the operators of c10d_functional that the running PyTorch lacks, with kernels. To be called once,
// after PyTorch has defined its own, which it does when torch.distributed._functional_collectives is
// imported.
//
// These are PyTorch's first functional collectives, whose groups are ranks and a tag. One boxed kernel turns
// each into _c10d_functional's operator of the same name. Autograd and tracers see that operator, as they do
// in PyTorch, where Python does this.
void define_missing_legacy_ops();

// Sets the function that is called with each error of these kernels, and may throw in its place the error
// that callers of PyTorch's operators expect. Null: none is called.
using TranslateError = void (*)(const c10::Error&);
void set_error_translation(TranslateError translate);

// Returns the operators that get kernels from install_core_kernels() in the running PyTorch:
// "_c10d_functional::all_reduce".
std::vector<std::string> ops_with_core_kernels();

}  // namespace funcol
