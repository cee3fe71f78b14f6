// The kernel of all simulated operators.
//
// It makes the results by the shapes that the operator's Meta kernel gives, then enqueues work that runs the
// CPU's kernel on the same memory. Where the host needs the values (results that are numbers, shapes that
// depend on values) or Meta refuses the arguments, the work runs at once: the host waits for the stream, as
// it does beside a GPU, and errors of the CPU's kernel are the caller's.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include "operators.h"

namespace simulated_gpu::aten {

c10::KernelFunction boxed_kernel(Operator op);

}  // namespace simulated_gpu::aten
