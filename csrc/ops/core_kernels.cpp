#include "ops/core_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "async/arguments.h"
#include "comm/process_group.h"
#include "compat/missing_operators.h"
#include "ops/backend_tensor.h"
#include "ops/operator.h"

namespace funcol {
namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<TranslateError> translate_error{nullptr};

// Makes the boxed kernel of a core kernel. It reads its arguments from the stack, because group and reduce op
// are `str` or `Any` in the schema, depending on the PyTorch release.
torch::CppFunction kernel_under_core(const CoreKernel& kernel) {
  const bool is_wait = kernel.name.starts_with("wait_");
  return boxed(kernel.name, [run = kernel.run, is_wait](Arguments arguments, const char* op) {
    try {
      for (const auto& argument : is_wait ? Arguments() : arguments) {
        visit_tensors(argument, [op](const at::Tensor& tensor) { check_no_tangents(tensor, op); });
      }
      return run(arguments, op);
    } catch (const c10::Error& error) {
      if (const auto translate = translate_error.load()) {
        translate(error);
      }
      throw;
    }
  });
}

// Returns true if `name_space` has an operator of the kernel's name: _c10d_functional_autograd has three.
bool exists_in(std::string_view name_space, const CoreKernel& kernel) {
  return !name_space.ends_with("_autograd") || kernel.name == "all_gather_into_tensor" ||
         kernel.name == "reduce_scatter_tensor" || kernel.name == "all_to_all_single";
}

// Returns all_reduce for "all_reduce(Tensor self, ...) -> Tensor".
std::string name_in_schema(std::string_view schema) {
  return std::string(schema.substr(0, schema.find('(')));
}

// The operators of c10d_functional, also those that only newer PyTorch releases have.
constexpr const char* kLegacySchemas[] = {
    "broadcast(Tensor self, int src, str tag, int[] ranks, int group_size) -> Tensor",
    "all_reduce(Tensor self, str reduceOp, str tag, int[] ranks, int group_size) -> Tensor",
    "all_reduce_coalesced(Tensor[] self, str reduceOp, str tag, int[] ranks, int group_size) -> Tensor[]",
    "wait_tensor(Tensor self) -> Tensor",
    "isend(Tensor self, int dst, int tag, str group_name) -> Tensor",
    "irecv(Tensor self, int src, int tag, str group_name) -> Tensor",
    "batch_p2p_ops(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str group_name) -> "
    "Tensor[]",
    "all_gather_into_tensor(Tensor shard, str tag, int[] ranks, int group_size) -> Tensor",
    "all_gather_into_tensor_coalesced(Tensor[] input, str tag, int[] ranks, int group_size) -> Tensor[]",
    "reduce_scatter_tensor(Tensor input, str reduceOp, str tag, int[] ranks, int group_size) -> Tensor",
    "reduce_scatter_tensor_coalesced(Tensor[] inputs, str reduceOp, str tag, int[] ranks, int group_size) -> "
    "Tensor[]",
    "all_to_all_single(Tensor input, SymInt[]? output_split_sizes, SymInt[]? input_split_sizes, str tag, "
    "int[] ranks, int group_size) -> Tensor",
};

// Replaces splits that were left out by equal shares of dim 0.
void fill_in_splits(IValue& output_splits, IValue& input_splits, const at::Tensor& input,
                    int64_t group_size) {
  TORCH_CHECK_VALUE(
      output_splits.isNone() == input_splits.isNone(),
      "funcol::all_to_all_single: pass both output_split_sizes and input_split_sizes, or neither.");
  if (output_splits.isNone()) {
    const std::vector<c10::SymInt> shares(group_size, input.sym_size(0) / group_size);
    output_splits = shares;
    input_splits = shares;
  }
}

// Returns the arguments of `core`, from those of the legacy operator, which end in tag, ranks, group_size.
Stack core_arguments(c10::ArrayRef<IValue> legacy, const c10::OperatorHandle& core, const char* op) {
  constexpr size_t kNumGroupArguments = 3;
  const auto own = legacy.slice(0, legacy.size() - kNumGroupArguments);
  const auto group_arguments = legacy.slice(own.size());
  const auto ranks = group_arguments[1].toIntVector();
  const auto group_size = group_arguments[2].toInt();
  const auto name = group_from_ranks(ranks, group_arguments[0].toStringView(), op)->getGroupName();

  Stack stack(own.begin(), own.end());
  if (own.size() == 3) {
    fill_in_splits(stack[1], stack[2], stack[0].toTensor(), group_size);
  }
  if (core.schema().argumentIndexWithName("group_size")) {
    stack.emplace_back(group_size);
  }
  stack.emplace_back(name);
  return stack;
}

void call_functional(const c10::OperatorHandle& op, Stack* stack) {
  const auto name = unqualified_name(op);
  const auto core = c10::Dispatcher::singleton().findSchemaOrThrow(("_c10d_functional::" + name).c_str(), "");
  if (op.schema().argumentIndexWithName("ranks")) {
    auto arguments = core_arguments(arguments_of(op, *stack), core, name.c_str());
    torch::jit::drop(*stack, op.schema().arguments().size());
    std::ranges::move(arguments, std::back_inserter(*stack));
  }
  core.callBoxed(stack);
}

torch::CppFunction legacy_kernel() { return torch::CppFunction::makeFromBoxedFunction<&call_functional>(); }

std::vector<std::string> legacy_op_names() {
  std::vector<std::string> names;
  for (const auto* schema : kLegacySchemas) {
    names.push_back(name_in_schema(schema));
  }
  return names;
}

constexpr const char* kCoreNamespaces[] = {"_c10d_functional", "_c10d_functional_autograd"};

// Registers the kernels for as long as the libraries live.
std::vector<torch::Library> register_kernels(const std::vector<std::string>& excluded) {
  using Key = c10::DispatchKey;
  std::vector<torch::Library> libraries;
  const auto library = [&](const char* name_space, Key key) -> torch::Library& {
    return libraries.emplace_back(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
  };
  for (const auto key : {Key::CPU, Key::CUDA}) {
    for (const auto* name_space : kCoreNamespaces) {
      auto& own = library(name_space, key);
      for (const auto& kernel : core_kernels()) {
        const auto name = std::string(name_space) + "::" + kernel.name;
        if (exists_in(name_space, kernel) && std::ranges::find(excluded, name) == excluded.end()) {
          own.impl(kernel.name.c_str(), kernel_under_core(kernel));
        }
      }
    }
  }
  // A legacy operator becomes core's above autograd, so that one with a kernel for a device needs one for
  // autograd, too.
  for (const auto key : {Key::CPU, Key::CUDA, Key::AutogradCPU, Key::AutogradCUDA}) {
    auto& legacy = library("c10d_functional", key);
    for (const auto& name : legacy_op_names()) {
      legacy.impl(name.c_str(), legacy_kernel());
    }
  }
  return libraries;
}

// Waits for threads that released the GIL to call an operator, and have not yet read the operator's kernel:
// they might read half of a kernel while the tables change. No further thread gets there as long as this one
// has the GIL; the others leave within a fraction of a microsecond on a free core.
void wait_for_entered_calls() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// Returns the libraries of the installed kernels; empty if none are installed.
std::vector<torch::Library>& libraries() {
  static std::vector<torch::Library> libraries;
  return libraries;
}

}  // namespace

void install_core_kernels(const std::vector<std::string>& excluded) {
  if (libraries().empty()) {
    wait_for_entered_calls();
    libraries() = register_kernels(excluded);
  }
}

void remove_core_kernels() {
  if (!libraries().empty()) {
    wait_for_entered_calls();
    libraries().clear();
  }
}

void define_missing_legacy_ops() {
  static torch::Library library(torch::Library::FRAGMENT, "c10d_functional", std::nullopt, __FILE__,
                                __LINE__);
  for (const auto* schema : kLegacySchemas) {
    const auto name = name_in_schema(schema);
    if (!compat::has_operator("c10d_functional::" + name)) {
      library.def(schema, {at::Tag::pt2_compliant_tag});
      library.impl(name.c_str(),
                   torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, legacy_kernel()));
    }
  }
}

void set_error_translation(TranslateError translate) { translate_error.store(translate); }

std::vector<std::string> ops_with_core_kernels() {
  std::vector<std::string> ops;
  for (const auto* name_space : kCoreNamespaces) {
    for (const auto& kernel : core_kernels()) {
      if (exists_in(name_space, kernel)) {
        ops.push_back(std::string(name_space) + "::" + kernel.name);
      }
    }
  }
  for (const auto& name : legacy_op_names()) {
    ops.push_back("c10d_functional::" + name);
  }
  return ops;
}

}  // namespace funcol
