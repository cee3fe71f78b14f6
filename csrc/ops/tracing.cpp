// What autograd and layers see of a funcol op.
//
// Compilers, exporters and debug modes know PyTorch's _c10d_functional ops, and so does autograd. So a
// funcol op that meets a layer, or an input that needs a gradient, becomes the op of the same name there,
// followed by wait_tensor where the funcol op would have returned a pending tensor. One boxed kernel does
// this for all ops: for the Autograd keys, and as the decomposition that modes ask for.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>

#include "async/async_tensor.h"
#include "async/layers.h"
#include "comm/process_group.h"
#include "comm/reduce_op.h"
#include "ops/wire.h"

namespace funcol {
namespace {

using c10::IValue;

std::string unqualified_name(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name.substr(name.find("::") + 2);
}

bool waits_by_itself(const std::string& name) {
  return name != "isend" && name != "wait_tensor" && name != "wait_tensors";
}

bool writes_arguments(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(), [](const auto& r) { return r.alias_info() != nullptr; });
}

// Groups and reduce ops by name, as all minors take them and graphs can hold them.
IValue named(const IValue& value, const std::string& argument, const char* op) {
  if (value.isString()) {
    return value;
  }
  if (argument == "group_name") {
    return group_from_ivalue(value, op)->getGroupName();
  }
  if (argument == "reduce_op") {
    const auto reduce_op = reduce_op_from_ivalue(value, op);
    TORCH_CHECK_NOT_IMPLEMENTED(
        reduce_op.op_ != c10d::ReduceOp::PREMUL_SUM, "funcol::", op,
        ": premul_sum cannot be traced or differentiated. Multiply first, then use sum.");
    return std::string(reduce_op_name(reduce_op));
  }
  return value;
}

at::Tensor wait_in_core(const at::Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(tensor);
}

void call_core(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = unqualified_name(op);
  const auto core = c10::Dispatcher::singleton().findSchemaOrThrow(("_c10d_functional::" + name).c_str(), "");
  const auto& arguments = schema.arguments();
  const auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    value = named(value, arguments[i].name(), name.c_str());
  }
  core.callBoxed(stack);
  if (writes_arguments(schema) || !waits_by_itself(name)) {
    return;
  }
  auto& result = stack->back();
  if (result.isTensor()) {
    result = wait_in_core(result.toTensor());
  } else {
    c10::List<at::Tensor> waited;
    for (const at::Tensor& tensor : result.toTensorVector()) {
      waited.push_back(wait_in_core(tensor));
    }
    result = std::move(waited);
  }
}

bool needs_core(const IValue& argument) {
  const auto for_tensor = [](const at::Tensor& tensor) {
    return tensor.defined() &&
           (belongs_to_layer(tensor) || (at::GradMode::is_enabled() && tensor.requires_grad()));
  };
  if (argument.isTensor()) {
    return for_tensor(argument.toTensor());
  }
  if (argument.isTensorList()) {
    const auto tensors = argument.toTensorVector();
    return std::any_of(tensors.begin(), tensors.end(), for_tensor);
  }
  return false;
}

// Of several devices the dispatcher would silently pick one.
void check_lists(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  const auto name = unqualified_name(op);
  if (name.find("coalesced") == std::string::npos) {
    return;
  }
  for (const auto& argument : arguments) {
    if (argument.isTensorList()) {
      check_alike(argument.toTensorVector(), name.c_str());
    }
  }
}

void autograd_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  check_lists(op, arguments);
  if (has_active_layers() || std::any_of(arguments.begin(), arguments.end(), needs_core)) {
    return call_core(op, stack);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

void decomposition(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call_core(op, stack); }

constexpr const char* kOps[] = {"all_reduce",
                                "all_reduce_",
                                "all_reduce_coalesced",
                                "all_reduce_coalesced_",
                                "all_gather_into_tensor",
                                "all_gather_into_tensor_out",
                                "all_gather_into_tensor_coalesced",
                                "reduce_scatter_tensor",
                                "reduce_scatter_tensor_out",
                                "reduce_scatter_tensor_coalesced",
                                "all_to_all_single",
                                "broadcast",
                                "broadcast_",
                                "isend",
                                "irecv",
                                "batch_p2p_ops",
                                "wait_tensor",
                                "wait_tensors"};

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_IMPL(funcol, Autograd, m) {
  for (const auto* name : funcol::kOps) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&funcol::autograd_kernel>());
  }
}

TORCH_LIBRARY_IMPL(funcol, CompositeImplicitAutograd, m) {
  for (const auto* name : funcol::kOps) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&funcol::decomposition>());
  }
}
