#include "metas/stack.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <string>
#include <utility>

namespace funcol {
namespace {

using c10::IValue;
using c10::TypeKind;

class Conversion {
 public:
  Conversion(const OpCall& call, at::Device device, const MakeTensor& make_tensor)
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

  // A number in a tensor's place, on the CPU as PyTorch's are: it does not decide the result's dtype as a
  // tensor would.
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
  const MakeTensor& make_tensor_;
};

}  // namespace

torch::jit::Stack to_stack(const c10::OperatorHandle& op, const OpCall& call, at::Device device,
                           const MakeTensor& make_tensor) {
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

}  // namespace funcol
