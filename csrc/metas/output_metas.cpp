#include "metas/output_metas.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "async/dispatch_modes.h"
#include "layout/cache.h"
#include "propagation/argument_words.h"

namespace funcol {
namespace {

using c10::IValue;
using c10::TypeKind;

using MakeTensor = at::Tensor (*)(const TensorMeta& meta);

at::Tensor meta_tensor(const TensorMeta& meta) {
  return at::empty_strided(
      meta.shape, meta.stride,
      at::TensorOptions().dtype(static_cast<at::ScalarType>(meta.dtype)).device(at::kMeta));
}

// A conversion of an OpCall's arguments to boxed ones: the inverse of to_argument().
class Conversion {
 public:
  Conversion(const OpCall& call, at::Device device, MakeTensor make_tensor)
      : call_(call), device_(device), make_tensor_(make_tensor) {}

  IValue convert(const Argument& argument, const c10::TypePtr& type) const {
    if (argument.is_none()) {
      return {};
    }
    switch (type->kind()) {
      case TypeKind::OptionalType:
        return convert(argument, type->expectRef<c10::OptionalType>().getElementType());
      case TypeKind::TensorType:
        return argument.is_tensor() ? make_tensor_(call_.tensors[argument.tensor()])
                                    : wrapped(scalar(argument));
      case TypeKind::ListType:
        return convert_list(argument, type->expectRef<c10::ListType>().getElementType());
      case TypeKind::DeviceObjType:
        return IValue(device_);
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

  // Returns a number as a tensor, on the CPU as in PyTorch: it does not decide the result's dtype as a tensor
  // would.
  static at::Tensor wrapped(const at::Scalar& number) {
    auto tensor = at::scalar_tensor(number, at::TensorOptions().dtype(number.type()).device(at::kCPU));
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
  at::Device device_;
  MakeTensor make_tensor_;
};

// Returns the arguments of `op`, with tensors that `make_tensor` makes of call.tensors, and `device` for
// every device. Tensors to write to (out=), which calls leave out, are empty.
torch::jit::Stack to_stack(const c10::OperatorHandle& op, const OpCall& call, at::Device device,
                           MakeTensor make_tensor) {
  const Conversion conversion(call, device, make_tensor);
  const auto dtype = call.tensors.empty() ? at::kFloat : static_cast<at::ScalarType>(call.tensors[0].dtype);
  torch::jit::Stack stack;
  size_t next = 0;
  for (const auto& argument : op.schema().arguments()) {
    if (argument.is_out()) {
      stack.emplace_back(at::empty({0}, at::TensorOptions().dtype(dtype).device(device)));
    } else {
      stack.push_back(conversion.convert(call.args.at(next++).second, argument.type()));
    }
  }
  return stack;
}

bool is_pointwise(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  return op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded) &&
         schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::TensorType &&
         std::ranges::none_of(schema.arguments(), [](const auto& argument) {
           return argument.is_out() || argument.name() == "memory_format";
         });
}

// Returns a tensor with as many dims as `meta`: type promotion treats tensors without dims differently.
at::Tensor one_element_tensor(const TensorMeta& meta) {
  return at::ones(std::vector<int64_t>(meta.shape.size(), 1),
                  at::TensorOptions().dtype(static_cast<at::ScalarType>(meta.dtype)));
}

// Returns a key of the operator and all that the dtype of its result depends on: the default dtype, dtypes,
// which tensors have no dims, and kinds of numbers.
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
  auto stack = to_stack(op, call, at::kCPU, one_element_tensor);
  op.callBoxed(stack);
  const auto dtype = stack.at(0).toTensor().scalar_type();
  known->insert_if_admitted(std::move(key), dtype);
  return dtype;
}

// Returns true if all tensors have one shape and are contiguous. The result is then contiguous, too.
bool are_equally_contiguous(const OpCall& call) {
  const auto& first = call.tensors[0];
  return first.stride == contiguous_strides(first.shape) &&
         std::ranges::all_of(call.tensors, [&](const auto& meta) {
           return meta.shape == first.shape && meta.stride == first.stride;
         });
}

at::Tensor iterator_output(const OpCall& call, at::ScalarType dtype) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).check_all_same_device(false);
  config.declare_static_dtype_and_device(dtype, at::kMeta).add_owned_output(at::Tensor());
  for (const auto& meta : call.tensors) {
    config.add_owned_const_input(meta_tensor(meta));
  }
  return config.build().output();
}

// Returns the output of an operator with PyTorch's tag `pointwise` that returns one tensor, draws no random
// numbers, and takes neither `out` nor a memory format: the sizes and strides that TensorIterator gives the
// result, and the dtype of the operator's result for tensors of one element; in place, the meta of the tensor
// that it writes to. Returns nullopt for any other operator, or if it does not run on such tensors. Many Meta
// kernels of pointwise operators are written in Python and take hundreds of microseconds.
std::optional<TensorMeta> pointwise_meta(const c10::OperatorHandle& op, const OpCall& call) {
  if (call.tensors.empty() || !is_pointwise(op)) {
    return std::nullopt;
  }
  try {
    const auto dtype = result_dtype(op, call);
    const auto& first = call.tensors[0];
    if (are_equally_contiguous(call)) {
      return writes_to_first(op.schema()) ? first
                                          : TensorMeta{first.shape, first.stride, static_cast<Dtype>(dtype)};
    }
    const auto output = iterator_output(call, dtype);
    if (writes_to_first(op.schema())) {
      return output.sizes() == at::IntArrayRef(first.shape) ? std::optional(first) : std::nullopt;
    }
    return TensorMeta{output.sizes().vec(), output.strides().vec(), static_cast<Dtype>(dtype)};
  } catch (const c10::Error&) {  // no kernel for the dtype, or arguments that the operator refuses itself
    return std::nullopt;
  }
}

// Splits "aten::add.Tensor" at the dot. PyTorch's parseName() takes 0.5 us, a fifth of a decision.
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

bool writes_to_first(const c10::FunctionSchema& schema) {
  return !schema.arguments().empty() && schema.arguments()[0].alias_info() != nullptr &&
         schema.arguments()[0].alias_info()->isWrite() && !schema.arguments()[0].is_out();
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
