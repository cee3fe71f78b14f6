#include "host_call.h"

#include <utility>

#include "aliases.h"

namespace simulated_gpu::aten {
namespace {

at::Tensor in_float(const at::Tensor& tensor) {
  const bool is_short =
      tensor.defined() && (tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf);
  return is_short ? tensor.to(at::kFloat) : tensor;
}

void store(const std::string& name, const at::Tensor& result, const at::Tensor& to) {
  if (!to.defined()) {
    return;
  }
  TORCH_CHECK(result.defined(), "simulated GPU: ", name,
              ": the CPU's kernel does not give a result that Meta's gives");
  TORCH_CHECK(result.sizes() == to.sizes() && result.is_floating_point() == to.is_floating_point(),
              "simulated GPU: ", name, ": the CPU's kernel gives ", result.toString(), " ", result.sizes(),
              ", Meta's gives ", to.toString(), " ", to.sizes());
  to.copy_(result);
}

}  // namespace

HostCall::HostCall(c10::OperatorHandle handle, std::shared_ptr<const Operator> op,
                   torch::jit::Stack arguments, RandomState random)
    : handle_(std::move(handle)), op_(std::move(op)), arguments_(std::move(arguments)), random_(random) {}

torch::jit::Stack HostCall::run() const {
  torch::jit::Stack stack = arguments_;
  const at::Generator generator = random_.cpu_generator();
  for (const size_t argument : op_->generators) {
    stack[argument] = generator;
  }
  if (op_->computes_in_float) {
    for (c10::IValue& value : stack) {
      value = map_tensors(value, in_float);
    }
  }
  if (op_->host_kernel) {
    return op_->host_kernel(std::move(stack), generator);
  }
  handle_.callBoxed(stack);
  return stack;
}

void HostCall::run_into(const torch::jit::Stack& results) const {
  const torch::jit::Stack computed = run();
  const std::string& name = handle_.operator_name().name;
  for (size_t r = 0; r < results.size(); ++r) {
    if (results[r].isTensor()) {
      store(name, computed[r].toTensor(), results[r].toTensor());
    } else if (results[r].isTensorList()) {
      const auto from = computed[r].toTensorVector();
      const auto to = results[r].toTensorVector();
      TORCH_CHECK(from.size() == to.size(), "simulated GPU: ", name, ": the CPU's kernel gives ", from.size(),
                  " tensors, Meta's gives ", to.size());
      for (size_t i = 0; i < to.size(); ++i) {
        store(name, from[i], to[i]);
      }
    }
  }
}

}  // namespace simulated_gpu::aten
