// Finds communicators that wait for each other for ever: rank 0 calls on A, then on B, and rank 1 on B, then
// on A, each call behind the one before it. Neither can finish, here or on a GPU.
//
// A rank that stalls leaves a note for each of its communicators: which letters its running call lacks, and
// of whom, or behind which other communicator its next call is queued. Notes are nodes of a graph; a circle
// of them is a deadlock. A note goes before its rank begins anything, so notes that are the same before and
// after a look at the letters were all true at once. Each rank that finds a circle reports it and fails its
// communicators in it.
//
// Does not find a next call that the host has not issued, or that a CUDA graph holds.
#pragma once

#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu::nccl {

// For set_on_stall().
void on_stall(const std::vector<Stalled>* stalls);

}  // namespace simulated_gpu::nccl
