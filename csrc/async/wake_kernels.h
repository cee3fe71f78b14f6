// Unboxed kernels at the wake key for the operators that programs most often use first on a result. They do
// what the fallback does (wake_fallback.h): its boxed arguments cost more than waiting for data that is
// there.
#pragma once

namespace funcol {

// Registers the kernels. Called once, where the fallback is registered.
void add_wake_kernels();

}  // namespace funcol
