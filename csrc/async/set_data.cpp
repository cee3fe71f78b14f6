// Kernels of the two operators that copy the pointer to another tensor's storage, past storage().
//
// The wake key protects a pending source, but a compiled region hides the key. These kernels settle their
// arguments in any case.
#include <ATen/core/VariableHooksInterface.h>
#include <torch/library.h>

#include "async/arguments.h"
#include "async/async_tensor.h"
#include "compat/missing_operators.h"

namespace funcol {
namespace {

// Replaces PyTorch's kernel of aten::set_data, which is composed above autograd.
void set_data(at::Tensor& self, const at::Tensor& new_data) {
  settle(self);
  settle(new_data);
  at::impl::GetVariableHooks()->set_data(self, new_data);
  correct_wake_key(*self.unsafeGetTensorImpl());
}

// Settles the arguments of aten::shallow_copy_data_, then calls PyTorch's kernel, which is one for all
// backends. Every call passes BackendSelect, below autograd, whatever the device.
void settle_and_redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  const auto arguments = arguments_of(op, *stack);
  const auto written = arguments[0].toTensor();
  for (const auto& argument : arguments) {
    visit_tensors(argument, [](const at::Tensor& tensor) { settle(tensor); });
  }
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), stack);
  correct_wake_key(*written.unsafeGetTensorImpl());
}

}  // namespace
}  // namespace funcol

// PyTorch's composite kernel precedes an Autograd kernel for all devices, but not one for a device.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("set_data", funcol::set_data); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("set_data", funcol::set_data); }
TORCH_LIBRARY_IMPL(aten, AutogradXPU, m) { m.impl("set_data", funcol::set_data); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("set_data", funcol::set_data); }

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  if (funcol::compat::has_operator("aten::shallow_copy_data_")) {
    m.impl("shallow_copy_data_", torch::CppFunction::makeFromBoxedFunction<&funcol::settle_and_redispatch>());
  }
}
