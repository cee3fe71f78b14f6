// The text of ncclGetLastError().
#pragma once

#include <nccl.h>

#include <string>

namespace simulated_gpu::nccl {

// Remembers `why`, for all threads, and returns `error`.
ncclResult_t refuse(ncclResult_t error, const std::string& why);

// Valid until the calling thread asks again.
const char* last_error();

}  // namespace simulated_gpu::nccl
