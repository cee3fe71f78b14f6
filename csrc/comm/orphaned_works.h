// Collectives whose result nobody holds any more.
//
// A collective that was started must run to its end on every rank, and its buffers must outlive it,
// also when this rank dropped the result without looking at it. Such a Work is kept here, with the
// tensors it reads and writes, until it is done. No caller waits: a later call drops what has finished.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace funcol {

// A Work that ends only when it is waited for is waited for, on a thread of its own (comm/background.h).
void adopt_orphan(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers,
                  bool ends_only_by_waiting = false);

// Drops the finished ones; how many are still running. Cheap while there are none. None is asked where that
// is not allowed (comm/asking_devices.h).
size_t sweep_orphans();

// The same for a few of them, others at each call, until it meets some that all run: what a collective that
// starts can afford, however many there are.
void sweep_some_orphans();

}  // namespace funcol
