// Threads that wait for Works nobody else waits for.
//
// Some Works end only when somebody waits for them: Gloo's sends and receives, and its reduce_scatter, whose
// wait() makes the result.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/group_ref.h"

namespace funcol {

// Returns true if a Work of `group` on the CPU never reports isCompleted() before it was waited for. Returns
// false if the group no longer exists, and for Works written in Python, whose futures report completion.
bool ends_only_by_waiting(const c10d::Work& work, const GroupRef& group) noexcept;

// Calls `wait`, which may block for long, on another thread and without the GIL. At most 8 threads wait at a
// time; further calls queue. Exceptions of `wait` are dropped. A thread destroys its `wait` before it takes
// the next. A forked child starts without threads and with an empty queue.
void wait_in_background(std::function<void()> wait);

}  // namespace funcol
