// Work that cannot begin while nothing runs to its end: see set_on_stall().
#pragma once

#include <vector>

#include "simulated_gpu.h"
#include "stream.h"

namespace simulated_gpu {

// The next operation of each chain whose operation has not begun, of the work that is queued on `streams`.
// With the runtime's lock held.
std::vector<Stalled> find_stalls(const std::vector<Stream*>& streams);

// Calls the function of set_on_stall(), if there is one. Without the lock.
void tell_of_stalls(const std::vector<Stalled>* stalls);

}  // namespace simulated_gpu
