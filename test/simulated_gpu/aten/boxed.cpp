#include "boxed.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "aliases.h"
#include "flops.h"
#include "host_call.h"
#include "issue.h"
#include "places.h"
#include "random.h"

namespace simulated_gpu::aten {
namespace {

using c10::IValue;
using torch::jit::Stack;

class Call {
 public:
  Call(const c10::OperatorHandle& handle, std::shared_ptr<const Operator> op, Stack* stack);
  void run();

 private:
  void find_device();
  void check_devices() const;
  bool host_must_wait() const;
  bool find_shapes();
  void resize_outs() const;
  void run_later();
  void run_now();
  Stack computed_now();
  void send(const at::Tensor& value, const at::Tensor& target) const;
  RandomState draw() const;
  Amount amount() const;
  Tensors used_tensors() const;
  const std::string& name() const { return handle_.operator_name().name; }

  template <typename Use>
  void each_argument_tensor(const Use& use) const {
    for (const IValue& argument : arguments_) {
      each_tensor(argument, use);
    }
  }

  template <typename Map>
  Stack arguments_for(at::Device device, const Map& map) const {
    Stack arguments;
    for (const IValue& argument : arguments_) {
      arguments.push_back(argument.isDevice() ? IValue(device) : map_tensors(argument, map));
    }
    return arguments;
  }

  const c10::OperatorHandle& handle_;
  std::shared_ptr<const Operator> op_;
  Stack* stack_;  // of the caller: takes the results
  Stack arguments_;
  at::Device device_ = at::Device(at::kCUDA);  // of all CUDA tensors
  Stack shapes_;                               // results on Meta
};

Call::Call(const c10::OperatorHandle& handle, std::shared_ptr<const Operator> op, Stack* stack)
    : handle_(handle),
      op_(std::move(op)),
      stack_(stack),
      arguments_(torch::jit::pop(*stack, op_->num_arguments)) {}

void Call::run() {
  const TracedCall call;
  find_device();
  check_devices();
  const c10::cuda::CUDAGuard guard(device_);
  const AtOnePlace place;
  if (!host_must_wait() && !multiplies_two_dtypes(name(), arguments_) && find_shapes()) {
    run_later();
  } else {
    run_now();
  }
}

// Sets the device: that of the first CUDA tensor, tensors without elements last; else the one that the call
// names; else the current one.
void Call::find_device() {
  std::optional<at::Device> of_tensor, of_empty_tensor, named;
  each_argument_tensor([&](const at::Tensor& tensor) {
    auto& found = tensor.numel() > 0 ? of_tensor : of_empty_tensor;
    if (tensor.is_cuda() && !found) {
      found = tensor.device();
    }
  });
  for (const IValue& argument : arguments_) {
    if (argument.isDevice() && argument.toDevice().is_cuda()) {
      named = argument.toDevice();
    }
  }
  device_ = of_tensor         ? *of_tensor
            : of_empty_tensor ? *of_empty_tensor
                              : named.value_or(at::Device(at::kCUDA));
  if (!device_.has_index()) {
    device_ = at::Device(at::kCUDA, c10::cuda::current_device());
  }
}

// PyTorch's rule: tensors without elements may be anywhere, numbers may be on the CPU.
void Call::check_devices() const {
  each_argument_tensor([&](const at::Tensor& tensor) {
    const bool may_be_on_host = op_->takes_host_tensors || tensor.dim() == 0;
    TORCH_CHECK(tensor.numel() == 0 || tensor.device() == device_ || (tensor.is_cpu() && may_be_on_host),
                "Expected all tensors to be on the same device, but found at least two devices, ", device_,
                " and ", tensor.device(), "! (when running ", handle_.operator_name(),
                " on the simulated GPU)");
  });
}

bool Call::host_must_wait() const {
  bool writes_host_tensor = false;
  for (size_t a = 0; a < arguments_.size(); ++a) {
    if (op_->is_out(a) || op_->is_updated(a)) {
      each_tensor(arguments_[a], [&](const at::Tensor& tensor) { writes_host_tensor |= !tensor.is_cuda(); });
    }
  }
  return op_->has_numbers || writes_host_tensor;
}

// Runs the operator on Meta, which refuses wrong arguments. Returns whether the results are known without
// values. Where nothing has to be made, an operator needs no Meta kernel.
bool Call::find_shapes() {
  Stack results = arguments_for(at::Device(at::kMeta), meta_like);
  for (const size_t argument : op_->generators) {
    results[argument] = IValue();
  }
  try {
    const at::NoGradGuard no_gradients;
    handle_.callBoxed(results);
  } catch (const c10::NotImplementedError&) {
    return !op_->has_new_results() && op_->outs.empty();
  } catch (const std::exception&) {
    return false;
  }
  shapes_ = std::move(results);
  resize_outs();
  return true;
}

void Call::resize_outs() const {
  for (size_t r = 0; r < op_->argument_of_result.size(); ++r) {
    const std::optional<size_t> argument = op_->argument_of_result[r];
    if (!argument || !op_->is_out(*argument) || !arguments_[*argument].isTensor()) {
      continue;
    }
    const at::Tensor out = arguments_[*argument].toTensor();
    if (out.sizes() != shapes_[r].toTensor().sizes()) {
      out.resize_(shapes_[r].toTensor().sizes());
    }
  }
}

void Call::run_later() {
  HostCall call(handle_, op_, arguments_for(at::Device(at::kCPU), kernel_argument), draw());
  Tensors tensors = used_tensors();
  Stack targets;
  for (size_t r = 0; r < op_->argument_of_result.size(); ++r) {
    if (const std::optional<size_t> argument = op_->argument_of_result[r]) {
      stack_->push_back(arguments_[*argument]);
      targets.emplace_back();
      continue;
    }
    IValue result = map_tensors(shapes_[r], [&](const at::Tensor& shape) {
      return shape.defined() ? empty_on(device_, shape) : shape;
    });
    each_tensor(result, [&](const at::Tensor& tensor) { tensors.written.push_back(tensor); });
    targets.push_back(map_tensors(result, cpu_alias));
    stack_->push_back(std::move(result));
  }
  auto run = [call = std::move(call), targets = std::move(targets)] { call.run_into(targets); };
  issue(name(), tensors, std::move(run), amount());
}

void Call::run_now() {
  const Stack results = computed_now();
  for (size_t r = 0; r < results.size(); ++r) {
    const std::optional<size_t> argument = op_->argument_of_result[r];
    if (!argument) {
      stack_->push_back(map_tensors(results[r], [&](const at::Tensor& value) {
        if (!value.defined()) {
          return value;
        }
        const at::Tensor result = empty_on(device_, value);
        send(value, result);
        return result;
      }));
      continue;
    }
    if (op_->is_out(*argument) && arguments_[*argument].isTensor()) {
      const at::Tensor out = arguments_[*argument].toTensor();
      out.resize_(results[r].toTensor().sizes());
      send(results[r].toTensor(), out);
    }
    stack_->push_back(arguments_[*argument]);
  }
}

// Runs as work of the stream, and waits for it. What is written as a whole goes to new CPU tensors.
Stack Call::computed_now() {
  struct Outcome {
    Stack results;
    std::exception_ptr error;
  };
  Stack arguments = arguments_for(at::Device(at::kCPU), cpu_alias);
  for (const size_t out : op_->outs) {
    arguments[out] = map_tensors(arguments[out], [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.new_empty({0}) : tensor;
    });
  }
  Tensors tensors = used_tensors();
  tensors.written.clear();
  auto outcome = std::make_shared<Outcome>();
  auto run = [call = HostCall(handle_, op_, std::move(arguments), draw()), outcome] {
    try {
      outcome->results = call.run();
    } catch (...) {
      outcome->error = std::current_exception();
    }
  };
  issue(name(), tensors, std::move(run), amount());
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
  if (outcome->error) {
    std::rethrow_exception(outcome->error);
  }
  return std::move(outcome->results);
}

void Call::send(const at::Tensor& value, const at::Tensor& target) const {
  issue(name(), {.written = {target}}, [value, to = cpu_alias(target)] { to.copy_(value); });
}

Amount Call::amount() const {
  Amount amount;
  if (!options().trace_file.empty()) {
    add_flops(name(), arguments_, amount);
  }
  return amount;
}

RandomState Call::draw() const {
  if (!op_->is_random()) {
    return {};
  }
  std::optional<at::Generator> given;
  if (!op_->generators.empty()) {
    given = arguments_[op_->generators.front()].toOptional<at::Generator>();
  }
  return RandomState::draw(given);
}

Tensors Call::used_tensors() const {
  Tensors tensors;
  for (size_t a = 0; a < arguments_.size(); ++a) {
    auto& list = op_->is_out(a) ? tensors.written : op_->is_updated(a) ? tensors.updated : tensors.read;
    each_tensor(arguments_[a], [&](const at::Tensor& tensor) { list.push_back(tensor); });
  }
  return tensors;
}

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(Operator op) : op_(std::make_shared<const Operator>(std::move(op))) {}

  // NOLINTNEXTLINE(google-runtime-references): the dispatcher's signature
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet /*keys*/, Stack* stack) {
    Call(handle, op_, stack).run();
  }

 private:
  std::shared_ptr<const Operator> op_;
};

}  // namespace

c10::KernelFunction boxed_kernel(Operator op) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(op)));
}

}  // namespace simulated_gpu::aten
