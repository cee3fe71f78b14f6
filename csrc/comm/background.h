// Waiting that no caller's thread does.
//
// Some Works end only when somebody waits for them: Gloo's sends and receives, and its reduce_scatter, whose
// wait() makes the result. One that nobody is going to wait for is waited for here.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/group_ref.h"

namespace funcol {

// True of a Work of `group` on the CPU that never says isCompleted() before it was waited for. False if the
// group is gone, and of Works that are written in Python, whose futures tell.
bool ends_only_by_waiting(const c10d::Work& work, const GroupRef& group) noexcept;

// Calls `wait`, which may block for long, soon and on another thread, without the GIL. At most 8 wait at a
// time; others queue behind them. What `wait` raises is dropped, and so is `wait` itself before that thread
// takes the next one. A forked child starts with none: its parent waits for its own.
void wait_in_background(std::function<void()> wait);

}  // namespace funcol
