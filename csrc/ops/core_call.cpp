#include "ops/core_call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <utility>

#include "comm/process_group.h"
#include "comm/reduce_op.h"

namespace funcol::core {

using at::Tensor;
using c10::SymInt;

IValue as_name(const IValue& value, const std::string& argument, const char* op) {
  if (value.isString()) {
    return value;
  }
  if (argument == "group_name") {
    return group_from_ivalue(value, op)->getGroupName();
  }
  if (argument == "reduce_op") {
    const auto reduce_op = reduce_op_from_ivalue(value, op);
    TORCH_CHECK_NOT_IMPLEMENTED(reduce_op.op_ != c10d::ReduceOp::PREMUL_SUM, "funcol::", op,
                                ": premul_sum cannot be traced. Multiply first, then use sum.");
    return std::string(reduce_op_name(reduce_op));
  }
  return value;
}

IValue call(const char* name, std::vector<IValue> arguments) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow((std::string("_c10d_functional::") + name).c_str(), "");
  for (size_t i = 0; i < arguments.size(); ++i) {
    arguments[i] = as_name(arguments[i], op.schema().arguments()[i].name(), name);
  }
  op.callBoxed(&arguments);
  return std::move(arguments.back());
}

IValue waited(const IValue& result) {
  if (result.isTensor()) {
    return wait_tensor(result.toTensor());
  }
  c10::List<Tensor> tensors;
  for (const Tensor& tensor : result.toTensorVector()) {
    tensors.push_back(wait_tensor(tensor));
  }
  return tensors;
}

IValue call_and_wait(const char* name, std::vector<IValue> arguments) {
  return waited(call(name, std::move(arguments)));
}

Tensor wait_tensor(const Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<Tensor(const Tensor&)>();
  return op.call(tensor);
}

Tensor as_pairs(const Tensor& tensor) {
  auto numbers = tensor.resolve_conj();
  if (numbers.dim() == 0) {
    numbers = numbers.view({1});
  }
  return numbers.is_complex() ? at::view_as_real(numbers) : numbers;
}

Tensor from_pairs(const Tensor& moved, const Tensor& input) {
  return input.is_complex() ? at::view_as_complex(moved) : moved;
}

Tensor pad_to(const Tensor& tensor, int64_t dim, const SymInt& size) {
  std::vector<SymInt> padding(2 * (tensor.dim() - dim), SymInt(0));
  padding.back() = size - tensor.sym_size(dim);
  return at::constant_pad_nd_symint(tensor, padding);
}

SymInt largest(c10::SymIntArrayRef sizes) {
  SymInt max = sizes[0];
  for (const auto& size : sizes) {
    max = max.max(size);
  }
  return max;
}

}  // namespace funcol::core
