#include "ops/legacy.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "comm/process_group.h"
#include "ops/op_name.h"

namespace funcol {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr const char* kSchemas[] = {
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

// Splits that were left out are equal shares of dim 0.
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

// The arguments of `core`, from the legacy operator's, which end in tag, ranks, group_size.
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
    const auto num_arguments = op.schema().arguments().size();
    auto arguments = core_arguments(torch::jit::last(*stack, num_arguments), core, name.c_str());
    torch::jit::drop(*stack, num_arguments);
    std::ranges::move(arguments, std::back_inserter(*stack));
  }
  core.callBoxed(stack);
}

torch::CppFunction kernel() { return torch::CppFunction::makeFromBoxedFunction<&call_functional>(); }

bool is_defined(const std::string& name) {
  return c10::Dispatcher::singleton().findSchema({"c10d_functional::" + name, ""}).has_value();
}

}  // namespace

std::vector<std::string> legacy_op_names() {
  std::vector<std::string> names;
  for (const auto* schema : kSchemas) {
    names.push_back(name_in_schema(schema));
  }
  return names;
}

void define_missing_legacy_ops() {
  static torch::Library library(torch::Library::FRAGMENT, "c10d_functional", std::nullopt, __FILE__,
                                __LINE__);
  for (const auto* schema : kSchemas) {
    const auto name = name_in_schema(schema);
    if (!is_defined(name)) {
      library.def(schema, {at::Tag::pt2_compliant_tag});
      library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, kernel()));
    }
  }
}

void register_legacy_kernels(torch::Library& library) {
  for (const auto& name : legacy_op_names()) {
    library.impl(name.c_str(), kernel());
  }
}

}  // namespace funcol
