// Collectives whose result nobody holds any more.
//
// A started collective must run to its end on every rank, and its buffers must outlive it, even when this
// rank dropped the result without looking at it. Such a Work is kept here until it is done, with the tensors
// that it reads and writes. No caller waits: a later call drops finished Works.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/collective_info.h"

namespace funcol {

// `ends_only_by_waiting`: a thread in the background waits for the Work (comm/waiter_threads.h).
void adopt_orphan(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers,
                  bool ends_only_by_waiting = false, InFlight what = {});

// Returns the kept collectives, the oldest first. Some may have completed: call sweep_orphans() first to drop
// them.
std::vector<InFlight> kept_orphans();

// Drops finished Works and returns the number of running ones. Cheap while there are none. Asks none where
// asking is not allowed (comm/capture_safe_query.h).
size_t sweep_orphans();

// Drops finished Works among the next few, and goes on until it meets a few that all run. Cheap enough for
// the start of every collective, however many Works there are.
void sweep_some_orphans();

}  // namespace funcol
