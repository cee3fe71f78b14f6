// Works for which no caller waits: those of collectives whose result was dropped, and those that complete
// only in wait(), such as Gloo's sends and receives, and its reduce_scatter, whose wait() makes the result.
//
// A started collective must run to its end on every rank, and its buffers must outlive it, even if this rank
// dropped the result unused. Such a Work is kept here until it has completed, with the tensors that it reads
// and writes. A later call drops completed Works.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/call_site.h"
#include "comm/group_ref.h"

namespace funcol {

// Keeps `work` and `buffers` until the Work has completed. If `ends_only_by_waiting`, wait_in_background()
// waits for it.
void adopt_orphan(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers,
                  bool ends_only_by_waiting = false, InFlight description = {});

// Returns the kept collectives, the oldest first. Some may have completed: call sweep_orphans() first to drop
// them.
std::vector<InFlight> kept_orphans();

// Drops completed Works and returns the number of running ones. Cheap while there are none. Queries none
// where queries are not allowed (comm/capture_safe_query.h).
size_t sweep_orphans();

// Drops completed Works among the next few, and goes on until it finds a few that all run. Cheap enough for
// the start of every collective, however many Works there are.
void sweep_some_orphans();

// Returns true for a Work that failed, too: the next wait() raises its error.
bool is_completed(c10d::Work& work);

// Returns true if `work` may be written in Python: such a Work does not name its operation, and needs the GIL
// to answer.
bool may_need_gil(const c10d::Work& work);

// Returns true if a Work of `group` on the CPU never reports isCompleted() before it was waited for. Returns
// false if the group no longer exists, and for Works written in Python, whose futures report completion.
bool ends_only_by_waiting(const c10d::Work& work, const GroupRef& group) noexcept;

// Calls `wait`, which may block for long, on another thread and without the GIL. At most 8 threads wait at a
// time; further calls queue. Exceptions of `wait` are dropped. A thread destroys its `wait` before it takes
// the next. A forked child starts without threads and with an empty queue.
void wait_in_background(std::function<void()> wait);

}  // namespace funcol
