// Groups of NCCL calls: what a thread calls between ncclGroupStart() and ncclGroupEnd() is issued at the end,
// as one operation for each communicator and stream. A call outside a group is a group of its own.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "nccl/call.h"
#include "nccl/creation.h"

namespace simulated_gpu::nccl {

void start_group();

// Of the outermost group: finishes the communicators that the group makes, and issues its calls. If a call
// was refused, issues none and returns the first error.
ncclResult_t end_group();

// Checks a call and adds it to the thread's group, or issues it.
ncclResult_t add(ncclComm_t handle, cudaStream_t stream, Call call);

// The same for a communicator that is being made.
ncclResult_t add(Finish finish);

}  // namespace simulated_gpu::nccl
