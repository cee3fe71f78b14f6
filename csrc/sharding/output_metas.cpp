#include "sharding/output_metas.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <utility>

namespace funcol {
namespace {

using c10::IValue;
using c10::TypeKind;

at::Tensor meta_tensor(const TensorMeta& meta) {
  return at::empty_strided(
      meta.shape, meta.stride,
      at::TensorOptions().dtype(static_cast<at::ScalarType>(meta.dtype)).device(at::kMeta));
}

TensorMeta look_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), static_cast<Dtype>(tensor.scalar_type())};
}

// From the arguments of a call to those of the operator.
class Conversion {
 public:
  explicit Conversion(const OpCall& call) : call_(call) {}

  IValue convert(const Argument& argument, const c10::TypePtr& type) const {
    if (argument.is_none()) {
      return {};
    }
    switch (type->kind()) {
      case TypeKind::OptionalType:
        return convert(argument, type->expectRef<c10::OptionalType>().getElementType());
      case TypeKind::TensorType:
        return argument.is_tensor() ? meta_tensor(call_.tensors[argument.tensor()]) : wrapped(scalar(argument));
      case TypeKind::ListType:
        return convert_list(argument, type->expectRef<c10::ListType>().getElementType());
      case TypeKind::DeviceObjType:
        return IValue(at::Device(at::kMeta));
      case TypeKind::NumberType:
        return scalar(argument);
      case TypeKind::FloatType:
        return argument.number();
      case TypeKind::BoolType:
        return argument.boolean();
      case TypeKind::StringType:
        return std::get<std::string>(argument.value);
      default:
        if (const auto* dtype = std::get_if<Dtype>(&argument.value)) {
          return static_cast<int64_t>(*dtype);
        }
        return argument.integer();
    }
  }

 private:
  static at::Scalar scalar(const Argument& argument) {
    if (const auto* flag = std::get_if<bool>(&argument.value)) {
      return *flag;
    }
    if (const auto* integer = std::get_if<int64_t>(&argument.value)) {
      return *integer;
    }
    return argument.number();
  }

  // A number in a tensor's place, which does not decide the result's dtype as a tensor would.
  static at::Tensor wrapped(const at::Scalar& number) {
    auto tensor = at::scalar_tensor(number, at::TensorOptions().dtype(number.type()).device(at::kMeta));
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  IValue convert_list(const Argument& argument, const c10::TypePtr& element_type) const {
    c10::impl::GenericList list(element_type);
    if (argument.is_list()) {
      for (const auto& element : argument.list()) {
        list.push_back(convert(element, element_type));
      }
    } else {  // int[1] takes a lone int
      list.push_back(convert(argument, element_type));
    }
    return list;
  }

  const OpCall& call_;
};

// Autograd, modes, transforms: without them what is left is the backend.
c10::DispatchKeySet keys_above_backend() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::python_ks | c10::functorch_transforms_ks |
         c10::DispatchKeySet({c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
                              c10::DispatchKey::PreDispatch, c10::DispatchKey::PythonDispatcher,
                              c10::DispatchKey::TESTING_ONLY_GenericMode,
                              c10::DispatchKey::TESTING_ONLY_GenericWrapper});
}

void append(const IValue& value, std::vector<std::optional<TensorMeta>>& looks) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    looks.push_back(tensor.defined() ? std::optional(look_of(tensor)) : std::nullopt);
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) {
      looks.emplace_back(look_of(tensor));
    }
  } else {
    looks.emplace_back(std::nullopt);
  }
}

}  // namespace

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

c10::OperatorName operator_name(std::string_view qualified) {
  const auto dot = qualified.find('.', qualified.find("::"));
  if (dot == std::string_view::npos) {
    return {std::string(qualified), ""};
  }
  return {std::string(qualified.substr(0, dot)), std::string(qualified.substr(dot + 1))};
}

std::vector<std::optional<TensorMeta>> output_metas(const c10::OperatorHandle& op, const OpCall& call) {
  if (op.schema().returns().empty()) {
    return {};
  }
  const c10::impl::ExcludeDispatchKeyGuard below(keys_above_backend());
  const Conversion conversion(call);
  torch::jit::Stack stack;
  size_t next = 0;
  for (const auto& argument : op.schema().arguments()) {
    if (argument.is_out()) {
      stack.emplace_back(at::empty({0}, at::TensorOptions().dtype(call.tensors.empty()
                                                                      ? at::kFloat
                                                                      : static_cast<at::ScalarType>(
                                                                            call.tensors[0].dtype))
                                            .device(at::kMeta)));
      continue;
    }
    stack.push_back(conversion.convert(call.args.at(next++).second, argument.type()));
  }
  op.callBoxed(stack);
  std::vector<std::optional<TensorMeta>> looks;
  for (const auto& value : stack) {
    append(value, looks);
  }
  return looks;
}

std::vector<std::optional<TensorMeta>> output_metas(const OpCall& call) {
  const auto op = c10::Dispatcher::singleton().findSchema(operator_name(call.op));
  TORCH_CHECK_VALUE(op.has_value(), "funcol: PyTorch has no operator ", call.op, ".");
  return output_metas(*op, call);
}

}  // namespace funcol
