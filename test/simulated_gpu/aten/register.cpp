// Entry points for the Python package: simulated_gpu_register() when it is imported,
// simulated_gpu_poison_allocated_memory() once PyTorch has initialized CUDA.

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "boxed.h"
#include "copies.h"
#include "operators.h"
#include "places.h"
#include "poison.h"
#include "simulated_gpu.h"
#include "special.h"

namespace simulated_gpu::aten {
namespace {

struct NamedHostKernel {
  const char* name;
  torch::jit::Stack (*host_kernel)(torch::jit::Stack, const at::Generator&);
  bool draws;  // random numbers
};

constexpr NamedHostKernel kHostKernels[] = {
    {"aten::native_dropout", dropout, true},
    {"aten::_scaled_dot_product_flash_attention", flash_attention, false},
    {"aten::_scaled_dot_product_flash_attention_backward", flash_attention_backward, false},
    {"aten::_scaled_dot_product_efficient_attention", efficient_attention, false},
    {"aten::_scaled_dot_product_efficient_attention_backward", efficient_attention_backward, false},
};

void register_operator(const c10::OperatorHandle& handle, HostKernel host_kernel = nullptr,
                       bool draws = false) {
  static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>();
  Operator op = describe(handle.schema());
  if (host_kernel) {
    op.host_kernel = std::move(host_kernel);
    op.draws = draws;
    op.has_numbers = false;  // Meta knows them
  }
  registrations->push_back(c10::Dispatcher::singleton().registerImpl(
      handle.operator_name(), c10::DispatchKey::CUDA, boxed_kernel(std::move(op)), std::nullopt, nullptr,
      "simulated GPU"));
}

bool is_of_pytorch(const std::string& name) {
  return name.starts_with("aten::") || name.starts_with("fsdp::");
}

// All operators that have kernels for CUDA and for the CPU. Returns how many there are.
int register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  int num_registered = 0;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto handle = dispatcher.findSchema(name);
    if (is_of_pytorch(name.name) && handle && handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
        handle->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) && is_simulated(handle->schema())) {
      register_operator(*handle);
      ++num_registered;
    }
  }
  // These choose a library by themselves.
  register_operator(dispatcher.findSchemaOrThrow("aten::convolution", ""));
  register_operator(dispatcher.findSchemaOrThrow("aten::convolution_backward", ""));
  for (const auto& [name, host_kernel, draws] : kHostKernels) {
    register_operator(dispatcher.findSchemaOrThrow(name, ""), host_kernel, draws);
  }
  register_copies();
  return num_registered;
}

// Attention is made of matrix products and softmax where the program does not choose a fused kernel by
// torch.nn.attention.sdpa_kernel; convolutions without a library.
void switch_libraries_off() {
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  at::globalContext().setUserEnabledCuDNN(false);
}

class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace
}  // namespace simulated_gpu::aten

extern "C" SIMULATED_GPU_API int simulated_gpu_register() {
  using namespace simulated_gpu::aten;
  Silence silence;  // PyTorch warns of every kernel that takes another's place
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
  const int num_registered = register_operators();
  switch_libraries_off();
  simulated_gpu::set_find_issue_place(find_issue_place);
  return num_registered;
}

extern "C" SIMULATED_GPU_API void simulated_gpu_poison_allocated_memory() {
  simulated_gpu::aten::poison_allocated_memory();
}
