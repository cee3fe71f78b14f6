#include "ops/operator.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "async/arguments.h"
#include "async/dispatch_modes.h"
#include "ops/backend_tensor.h"
#include "ops/core_call.h"
#include "ops/gradient.h"
#include "ops/schemas.h"

namespace funcol {
namespace {

std::vector<CoreKernel>& all_core_kernels() {
  static std::vector<CoreKernel> kernels;
  return kernels;
}

// Replaces the arguments on the stack by `results`: by the only result if the operator returns a tensor.
void return_results(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                    std::vector<at::Tensor> results) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  if (op.schema().returns()[0].type()->kind() == c10::TypeKind::TensorType) {
    stack->emplace_back(std::move(results[0]));
  } else {
    stack->emplace_back(std::move(results));
  }
}

class BoxedRun final : public c10::OperatorKernel {
 public:
  BoxedRun(std::string op, StackFunction run) : op_(std::move(op)), run_(std::move(run)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    return_results(op, stack, run_(arguments_of(op, *stack), op_.c_str()));
  }

 private:
  std::string op_;
  StackFunction run_;
};

}  // namespace

Operator::Operator(const OperatorInfo& info)
    : name_(info.name),
      op_(info.op == nullptr ? name_ : info.op),
      library_(torch::Library::FRAGMENT, "funcol", std::nullopt, __FILE__, __LINE__) {
  define_operators();
}

void Operator::set_kernel(c10::DispatchKey key, torch::CppFunction kernel) {
  library_.impl(name_.c_str(), torch::dispatch(key, std::move(kernel)));
}

void Operator::add_core_kernel(StackFunction run) const {
  all_core_kernels().push_back({name_, std::move(run)});
}

const std::vector<CoreKernel>& core_kernels() { return all_core_kernels(); }

std::vector<size_t> indices_of_receives(const c10::IValue& kinds) {
  std::vector<size_t> indices;
  for (size_t i = 0; i < kinds.toListRef().size(); ++i) {
    if (kinds.toListRef()[i].toStringRef() == "irecv") {
      indices.push_back(i);
    }
  }
  return indices;
}

torch::CppFunction boxed(std::string op, StackFunction run) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedRun>(std::move(op), std::move(run)));
}

namespace {

using c10::IValue;

bool is_wait(const std::string& name) { return name == "wait_tensor" || name == "wait_tensors"; }

bool waits_by_itself(const std::string& name) { return name != "isend" && !is_wait(name); }

bool writes_arguments(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::ranges::any_of(returns, [](const auto& r) { return r.alias_info() != nullptr; });
}

void call_core(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = unqualified_name(op);
  auto arguments = arguments_of(op, *stack).vec();
  torch::jit::drop(*stack, arguments.size());
  auto result = core::call(name.c_str(), std::move(arguments));
  if (waits_by_itself(name) && !writes_arguments(op.schema())) {
    result = core::waited(result);
  }
  stack->push_back(std::move(result));
}

bool needs_core(const IValue& argument) {
  bool is_needed = false;
  visit_tensors(argument, [&](const at::Tensor& tensor) {
    is_needed |= tensor.defined() && (belongs_to_layer(tensor) || autograd::needs_gradient(tensor));
  });
  return is_needed;
}

// Returns the tensors of the caller that `op` writes into.
std::vector<at::Tensor> written_tensors(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  const auto name = unqualified_name(op);
  if (name == "irecv") {
    return {arguments[0].toTensor()};
  }
  std::vector<at::Tensor> tensors;
  if (name == "batch_p2p_ops") {
    const auto all = arguments[3].toTensorVector();
    for (const auto i : indices_of_receives(arguments[0])) {
      tensors.push_back(all.at(i));
    }
    return tensors;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      visit_tensors(arguments[i], [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    }
  }
  return tensors;
}

bool is_unresolved(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

// Raises for conjugate and negative views: PyTorch would resolve them, and undo that when the operator
// returns, before the data has arrived.
void check_resolved(at::TensorList tensors, const std::string& name) {
  TORCH_CHECK_VALUE(std::ranges::none_of(tensors, is_unresolved), "funcol::", name,
                    ": a tensor to write into is a conjugate or negative view. Pass t.resolve_conj() or "
                    "t.resolve_neg(), whose memory holds the values.");
}

void autograd_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = arguments_of(op, *stack);
  if (op.schema().name() == "funcol::all_reduce_coalesced_") {
    // The dispatcher would silently pick one of several devices.
    check_one_device_and_dtype(arguments[0].toTensorVector(), "all_reduce_coalesced_");
  }
  const bool goes_to_core = has_active_layers() || std::ranges::any_of(arguments, needs_core);
  const auto name = unqualified_name(op);
  if (goes_to_core || !is_wait(name)) {
    bool any_unresolved = false;
    for (const auto& argument : arguments) {
      visit_tensors(argument, [&](const at::Tensor& tensor) {
        check_no_tangents(tensor, name.c_str());
        any_unresolved |= is_unresolved(tensor);
      });
    }
    if (any_unresolved) {
      check_resolved(written_tensors(op, arguments), name);
    }
  }
  if (goes_to_core) {
    // Only some of PyTorch's kernels note the write, which has to be noted before they make views of these
    // tensors.
    auto overwritten = written_tensors(op, arguments);
    std::erase_if(overwritten, belongs_to_layer);  // the layer notes the write itself
    note_written(overwritten);
    return call_core(op, stack);
  }
  const BelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// Returns the results on the meta device: the overwritten arguments themselves.
void meta_of_written(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  return_results(op, stack, written_tensors(op, arguments_of(op, *stack)));
}

}  // namespace

void forward_to_core(Operator& op) {
  using Key = c10::DispatchKey;
  op.set_kernel(Key::Autograd, torch::CppFunction::makeFromBoxedFunction<&autograd_kernel>());
  op.set_kernel(Key::CompositeImplicitAutograd, torch::CppFunction::makeFromBoxedFunction<&call_core>());
}

Operator in_place(const OperatorInfo& info, const StartFromStack& start) {
  const auto run = started(start, as_overwritten);
  return forwarded(
      info, [&] { return boxed(info.name, run); },
      torch::CppFunction::makeFromBoxedFunction<&meta_of_written>(), run);
}

}  // namespace funcol
