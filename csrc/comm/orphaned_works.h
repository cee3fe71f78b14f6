// Collectives whose result nobody holds any more.
//
// A collective that was started must run to its end on every rank, and its buffers must outlive it,
// also when this rank dropped the result without looking at it. Such a Work is kept here, with the
// tensors it reads and writes, until it is done. Nobody waits: a later call drops what has finished.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace funcol {

void adopt_orphan(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers);

// Says whether a CUDA graph is being captured on the current stream. No orphan is asked then: to query an
// event ends a capture. The Python bindings set one that asks PyTorch; the default says no.
using IsCapturing = bool (*)();
void set_is_capturing(IsCapturing is_capturing);

// Drops the finished ones; how many are still running. Cheap while there are none.
size_t sweep_orphans();

// The same for a few of them, others at each call, until it meets some that all run: what a collective that
// starts can afford, however many there are.
void sweep_some_orphans();

}  // namespace funcol
