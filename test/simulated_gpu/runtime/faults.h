// Host code that reads or writes device memory faults, as it does beside a GPU; here it is told what it did.
#pragma once

#include <cstddef>

namespace simulated_gpu {

// From now on a fault in [window, window + size) prints the address, the allocation, and the C++ stack,
// before the handler that was there, or the default, ends the process.
void report_faults_in(const void* window, size_t size);

}  // namespace simulated_gpu
