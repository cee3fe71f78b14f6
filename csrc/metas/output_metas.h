// What an operator returns for tensors of given looks: by running it on Meta tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>
#include <vector>

#include "propagation/op_call.h"

namespace funcol {

// Shape, strides and dtype of a tensor with plain numbers as sizes.
TensorMeta look_of(const at::Tensor& tensor);

// An argument of an operator as rules see it, of anything but tensors: numbers, strings, lists of them;
// dtypes, layouts and memory formats by their number, as the schema's types tell them apart. Throws
// NotImplementedError for what an Argument cannot hold, such as a complex or symbolic number.
Argument to_argument(const c10::IValue& value, const c10::TypePtr& type);

// Runs `op` on Meta tensors that look like those of `call`, below autograd and below everything that watches
// operators. A device argument becomes the Meta device; arguments of `op` that `call` lacks are tensors to
// write to, which then are made. Throws what the operator throws. Not remembered here.
std::vector<std::optional<TensorMeta>> output_metas(const c10::OperatorHandle& op, const OpCall& call);

// The same for the operator that `call` names; ValueError if there is none.
std::vector<std::optional<TensorMeta>> output_metas(const OpCall& call);

// "aten::add.Tensor" in two, as the dispatcher looks names up.
c10::OperatorName operator_name(std::string_view qualified);

}  // namespace funcol
