#include "metas/pointwise_metas.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "metas/stack.h"

namespace funcol {
namespace {

bool is_pointwise(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  return op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded) &&
         schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::TensorType &&
         std::ranges::none_of(schema.arguments(), [](const auto& argument) {
           return argument.is_out() || argument.name() == "memory_format";
         });
}

// Returns true for an operator in place, whose result is its first argument.
bool writes_to_first(const c10::OperatorHandle& op) {
  const auto* const alias = op.schema().arguments()[0].alias_info();
  return alias != nullptr && alias->isWrite();
}

// As many dims as `meta` has: promotion of dtypes treats tensors without dims differently.
at::Tensor of_one_element(const TensorMeta& meta) {
  return at::ones(std::vector<int64_t>(meta.shape.size(), 1),
                  at::TensorOptions().dtype(static_cast<at::ScalarType>(meta.dtype)));
}

at::ScalarType result_dtype(const c10::OperatorHandle& op, const OpCall& call) {
  auto stack = to_stack(op, call, at::kCPU, of_one_element);
  op.callBoxed(stack);
  return stack.at(0).toTensor().scalar_type();
}

at::Tensor iterator_output(const OpCall& call, at::ScalarType dtype) {
  const auto options = at::TensorOptions().device(at::kMeta);
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).check_all_same_device(false);
  config.declare_static_dtype_and_device(dtype, at::kMeta).add_owned_output(at::Tensor());
  for (const auto& meta : call.tensors) {
    config.add_owned_const_input(
        at::empty_strided(meta.shape, meta.stride, options.dtype(static_cast<at::ScalarType>(meta.dtype))));
  }
  return config.build().output();
}

}  // namespace

std::optional<TensorMeta> pointwise_meta(const c10::OperatorHandle& op, const OpCall& call) {
  if (call.tensors.empty() || !is_pointwise(op)) {
    return std::nullopt;
  }
  try {
    const auto dtype = result_dtype(op, call);
    const auto output = iterator_output(call, dtype);
    if (writes_to_first(op)) {
      const auto& first = call.tensors[0];
      return output.sizes() == at::IntArrayRef(first.shape) ? std::optional(first) : std::nullopt;
    }
    return TensorMeta{output.sizes().vec(), output.strides().vec(), static_cast<Dtype>(dtype)};
  } catch (const c10::Error&) {  // no kernel for the dtype, or arguments that the operator refuses itself
    return std::nullopt;
  }
}

}  // namespace funcol
