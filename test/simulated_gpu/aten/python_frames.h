// The frames of Python's stack, by the functions of Python's C API that every supported release has.
#pragma once

#include <string>
#include <vector>

namespace simulated_gpu::aten {

// Lines such as `File "train.py", line 12, in step`, innermost call first, that live as long as the process:
// a place in the code is described once. Empty where this thread may not or cannot ask Python (places.h).
// Takes the GIL.
std::vector<const std::string*> python_frames();

}  // namespace simulated_gpu::aten
