// The fallback of wake_fallback.h without boxes, which cost more than waiting for what is there already: for
// the operators that programs most often use first on a result.
#pragma once

namespace funcol {

// Once, by whoever registers the fallback.
void add_wake_kernels();

}  // namespace funcol
