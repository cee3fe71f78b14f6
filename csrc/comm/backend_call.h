// The shortest way to a group's backend.
#pragma once

#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <typeinfo>

#include "comm/call_site.h"
#include "comm/gil_release.h"
#include "compat/hooks.h"
#include "compat/work_names.h"

namespace funcol {

// Sets, or returns, the flag that a program has replaced kernels of c10d's operators, for example with
// torch.library.
void set_c10d_ops_are_replaced(bool are_replaced);
bool c10d_ops_are_replaced();

// Calls `collective(target)`, where target is the group's backend for `device_type`, or the group itself;
// both have the same members.
//
// c10d::ProcessGroup sends each collective through a dispatcher op (c10d::allreduce_, ...), which costs as
// much as the rest of starting a collective. The op matters only to a profiler, a subclass of ProcessGroup,
// or a program that replaced a kernel; the group's hooks, such as those of PyTorch's flight recorder, are
// called either way. Under layers that intercept operators no collective is started here.
template <typename Collective>
c10::intrusive_ptr<c10d::Work> on_backend(c10d::ProcessGroup& group, c10::DeviceType device_type,
                                          const Collective& collective) {
  const bool is_plain =
      typeid(group) == typeid(c10d::ProcessGroup) && group.hasBackends() && !c10d_ops_are_replaced();
  const NamedWorks named;
  c10::intrusive_ptr<c10d::Work> work;
  // Gloo locks its queue. A thread of Gloo's may hold that lock while it waits for the GIL to free a tensor.
  run_blocking([&] {
    const bool is_profiled = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
    work = is_plain && !is_profiled
               ? compat::on_hooked_backend(group, *group.getBackend(device_type), collective)
               : collective(group);
  });
  return work;
}

}  // namespace funcol
