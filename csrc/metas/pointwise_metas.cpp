#include "metas/pointwise_metas.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "layout/cache.h"
#include "metas/stack.h"
#include "propagation/argument_words.h"

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

// The operator, and all that the dtype of its result depends on: the default dtype, dtypes, which tensors
// have no dims, and kinds of numbers.
WordKey dtype_key(const OpCall& call) {
  WordKey key{{static_cast<uint64_t>(c10::get_default_dtype_as_scalartype())}};
  add_text(key.words, call.op);
  for (const auto& meta : call.tensors) {
    key.add(static_cast<uint64_t>(meta.dtype) << 1 | (meta.shape.empty() ? 1 : 0));
  }
  for (const auto& [name, argument] : call.args) {
    add_argument(key, argument, [](const Argument& /*number*/) {});
  }
  return key;
}

at::ScalarType result_dtype(const c10::OperatorHandle& op, const OpCall& call) {
  static auto* const known =
      new Cache<WordKey, at::ScalarType>(find_table("pointwise_dtypes"));  // NOLINT: outlives Python
  auto key = dtype_key(call);
  if (const auto* const dtype = known->find(key)) {
    return *dtype;
  }
  auto stack = to_stack(op, call, at::kCPU, of_one_element);
  op.callBoxed(stack);
  const auto dtype = stack.at(0).toTensor().scalar_type();
  known->put(std::move(key), dtype);
  return dtype;
}

// Returns true if all tensors have one shape and are contiguous, as is the result then.
bool are_alike(const OpCall& call) {
  const auto& first = call.tensors[0];
  return first.stride == contiguous_strides(first.shape) &&
         std::ranges::all_of(call.tensors, [&](const auto& meta) {
           return meta.shape == first.shape && meta.stride == first.stride;
         });
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
    const auto& first = call.tensors[0];
    if (are_alike(call)) {
      return writes_to_first(op) ? first : TensorMeta{first.shape, first.stride, static_cast<Dtype>(dtype)};
    }
    const auto output = iterator_output(call, dtype);
    if (writes_to_first(op)) {
      return output.sizes() == at::IntArrayRef(first.shape) ? std::optional(first) : std::nullopt;
    }
    return TensorMeta{output.sizes().vec(), output.strides().vec(), static_cast<Dtype>(dtype)};
  } catch (const c10::Error&) {  // no kernel for the dtype, or arguments that the operator refuses itself
    return std::nullopt;
  }
}

}  // namespace funcol
