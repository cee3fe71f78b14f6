// Reports of the simulated GPU about the program that runs on it.
#pragma once

#include <string>

#include "simulated_gpu.h"

namespace simulated_gpu {

// "seed 3, order random": with them the same run can be had again.
std::string how_to_repeat();

}  // namespace simulated_gpu
