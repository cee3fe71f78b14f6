#include "metas/output_metas.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <string_view>
#include <utility>

#include "async/dispatch_modes.h"
#include "metas/analytic_metas.h"
#include "metas/pointwise_metas.h"
#include "metas/stack.h"

namespace funcol {
namespace {

using c10::IValue;
using c10::TypeKind;

at::Tensor meta_tensor(const TensorMeta& meta) {
  return at::empty_strided(
      meta.shape, meta.stride,
      at::TensorOptions().dtype(static_cast<at::ScalarType>(meta.dtype)).device(at::kMeta));
}

// Splits "aten::add.Tensor". PyTorch's parseName() takes 0.5 us, a fifth of a decision.
c10::OperatorName operator_name(std::string_view qualified) {
  const auto dot = qualified.find('.', qualified.find("::"));
  if (dot == std::string_view::npos) {
    return {std::string(qualified), ""};
  }
  return {std::string(qualified.substr(0, dot)), std::string(qualified.substr(dot + 1))};
}

void append(const IValue& result, std::vector<std::optional<TensorMeta>>& metas) {
  if (result.isTensor()) {
    const auto& tensor = result.toTensor();
    metas.push_back(tensor.defined() ? std::optional(tensor_meta(tensor)) : std::nullopt);
  } else if (result.isTensorList()) {
    for (const auto& tensor : result.toTensorVector()) {
      metas.emplace_back(tensor_meta(tensor));
    }
  } else {
    metas.emplace_back(std::nullopt);
  }
}

}  // namespace

TensorMeta tensor_meta(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), static_cast<Dtype>(tensor.scalar_type())};
}

Argument to_argument(const IValue& value, const c10::TypePtr& type) {
  if (value.isNone()) {
    return {};
  }
  if (type->kind() == TypeKind::OptionalType) {
    return to_argument(value, type->expectRef<c10::OptionalType>().getElementType());
  }
  if (value.isBool()) {
    return {value.toBool()};
  }
  if (value.isInt()) {
    if (type->kind() == TypeKind::ScalarTypeType) {
      return {static_cast<Dtype>(value.toInt())};
    }
    return {value.toInt()};
  }
  if (value.isDouble()) {
    return {value.toDouble()};
  }
  if (value.isString()) {
    return {value.toStringRef()};
  }
  if (value.isDevice()) {
    return {value.toDevice().str()};
  }
  if (value.isList()) {
    const auto& element_type = type->expectRef<c10::ListType>().getElementType();
    Argument::List list;
    for (const IValue& element : value.toListRef()) {
      list.push_back(to_argument(element, element_type));
    }
    return {std::move(list)};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "funcol: an argument of type ", value.tagKind(),
                              " is not among those that rules see.");
}

std::vector<std::optional<TensorMeta>> output_metas(const c10::OperatorHandle& op, const OpCall& call) {
  if (op.schema().returns().empty()) {
    return {};
  }
  if (auto known = analytic_metas(call)) {
    return std::move(*known);
  }
  const OutsideLayers outside_layers;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  if (auto meta = pointwise_meta(op, call)) {
    return {std::move(meta)};
  }
  auto stack = to_stack(op, call, at::kMeta, meta_tensor);
  op.callBoxed(stack);
  std::vector<std::optional<TensorMeta>> metas;
  for (const auto& result : stack) {
    append(result, metas);
  }
  return metas;
}

std::vector<std::optional<TensorMeta>> output_metas(const OpCall& call) {
  const auto op = c10::Dispatcher::singleton().findSchema(operator_name(call.op));
  TORCH_CHECK_VALUE(op.has_value(), "funcol: PyTorch has no operator ", call.op, ".");
  return output_metas(*op, call);
}

}  // namespace funcol
