// Operators that give a tensor the storage of another one by copying the pointer, past storage().
//
// The wake key protects a pending source, but it is hidden while a compiled region runs. These two settle
// their arguments whether or not it is.
#include <ATen/core/VariableHooksInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "async/async_tensor.h"

namespace funcol {
namespace {

// aten::set_data is composed above autograd: this stands in for the composition.
void set_data(at::Tensor& self, const at::Tensor& new_data) {
  settle(self);
  settle(new_data);
  at::impl::GetVariableHooks()->set_data(self, new_data);
  correct_wake_key(*self.unsafeGetTensorImpl());
}

// aten::shallow_copy_data_ has one kernel for all backends. BackendSelect is part of every call and below
// autograd: a place to look at the arguments, whatever the device.
void settle_and_go_on(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto written = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) {
      settle(argument.toTensor());
    }
  }
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), stack);
  correct_wake_key(*written.unsafeGetTensorImpl());
}

}  // namespace
}  // namespace funcol

// The composition comes before an Autograd kernel for all devices, but after one for a device.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("set_data", funcol::set_data); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("set_data", funcol::set_data); }
TORCH_LIBRARY_IMPL(aten, AutogradXPU, m) { m.impl("set_data", funcol::set_data); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("set_data", funcol::set_data); }

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  if (c10::Dispatcher::singleton().findSchema({"aten::shallow_copy_data_", ""})) {  // newer minors only
    m.impl("shallow_copy_data_", torch::CppFunction::makeFromBoxedFunction<&funcol::settle_and_go_on>());
  }
}
