// Sizes, strides and dtypes of an operator's results, found by running it on Meta tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

#include "propagation/op_call.h"

namespace funcol {

// Shape, strides and dtype of a tensor without symbolic sizes.
TensorMeta tensor_meta(const at::Tensor& tensor);

// Returns true for an operator in place. Its name says it only if it ends in one underscore: __and__ returns
// a new tensor, and __iand__ its first argument.
bool writes_to_first(const c10::FunctionSchema& schema);

// An operator's argument other than a tensor, as sharding rules see it: numbers, strings, lists of them, and
// the numbers of dtypes, layouts and memory formats, which the schema's type tells apart. NotImplementedError
// for a value that an Argument cannot hold, such as a complex or symbolic number.
Argument to_argument(const c10::IValue& value, const c10::TypePtr& type);

// Runs `op` on Meta tensors with the metas of call.tensors, below autograd and all layers that watch
// operators. A device argument becomes the Meta device; out= arguments, which `call` lacks, become new
// tensors. Throws the operator's error. Nothing is remembered.
std::vector<std::optional<TensorMeta>> output_metas(const c10::OperatorHandle& op, const OpCall& call);

// The same for the operator that `call` names; ValueError if there is none.
std::vector<std::optional<TensorMeta>> output_metas(const OpCall& call);

// The outputs of common reductions, matrix products, softmax and log_softmax with their backwards,
// native_layer_norm with its backward, cat, cumsum, tril and triu. Where devices differ, the outputs are
// those of a GPU (statistics of half precision inputs are float). Nothing for other operators, and for
// arguments that the operator itself has to check.
std::optional<std::vector<std::optional<TensorMeta>>> analytic_metas(const OpCall& call);

}  // namespace funcol
