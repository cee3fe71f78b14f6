// Forks of this process.
#pragma once

#include <cstdint>

namespace funcol {

// The number of forks between the process that loaded funcol and this one: 0 outside of forked processes.
uint64_t num_forks() noexcept;

}  // namespace funcol
