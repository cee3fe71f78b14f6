// The shortest way to a group's backend.
#pragma once

#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <typeinfo>

#include "comm/blocking.h"

namespace funcol {

// Whether a program gave operators of c10d kernels of its own, by torch.library for one, from now on.
void set_c10d_ops_are_replaced(bool are_replaced);
bool c10d_ops_are_replaced();

// Calls `collective(target)`, where target is the group's backend for `device_type`, or the group itself.
//
// c10d::ProcessGroup sends each collective through a dispatcher op of its own (c10d::allreduce_, ...), which
// costs as much as everything else that starting one takes. That op only matters to somebody who watches or
// replaces it: a profiler, a subclass of ProcessGroup, a program with a kernel of its own. Layers that
// intercept operators are excluded before, since under them no collective is started here. Backends have the
// members of ProcessGroup.
template <typename Collective>
c10::intrusive_ptr<c10d::Work> on_backend(c10d::ProcessGroup& group, c10::DeviceType device_type,
                                          const Collective& collective) {
  const bool is_plain =
      typeid(group) == typeid(c10d::ProcessGroup) && group.hasBackends() && !c10d_ops_are_replaced();
  c10::intrusive_ptr<c10d::Work> work;
  // Gloo takes a lock for its queue, which its threads may have while they wait for the GIL, to let go of a
  // tensor of Python's.
  run_blocking([&] {
    const bool is_profiled = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
    work = is_plain && !is_profiled ? collective(*group.getBackend(device_type)) : collective(group);
  });
  return work;
}

}  // namespace funcol
