// Sizes, strides and dtypes of an operator's results, found analytically or by a run on Meta tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

#include "propagation/op_call.h"

namespace funcol {

// Returns shape, strides and dtype of a tensor without symbolic sizes.
TensorMeta tensor_meta(const at::Tensor& tensor);

// Returns true for an in-place operator. Its name shows that only if it ends in one underscore: __and__
// returns a new tensor, and __iand__ its first argument.
bool writes_to_first(const c10::FunctionSchema& schema);

// Converts an operator's argument other than a tensor for sharding rules: numbers, strings, lists of them,
// and the numbers of dtypes, layouts and memory formats, which the schema's type tells apart. Throws
// NotImplementedError for a value that an Argument cannot hold, such as a complex or symbolic number.
Argument to_argument(const c10::IValue& value, const c10::TypePtr& type);

// Returns the outputs of `op`: those of analytic_metas() or TensorIterator if they apply, else those of a run
// on Meta tensors with the metas of call.tensors, below autograd and all layers that watch operators. The run
// replaces device arguments by the Meta device, and adds new tensors for out= arguments, which `call` lacks.
// Throws the operator's error. Only dtypes of pointwise operators are cached.
std::vector<std::optional<TensorMeta>> output_metas(const c10::OperatorHandle& op, const OpCall& call);

// Returns the same for the operator that `call` names. Throws ValueError if there is none.
std::vector<std::optional<TensorMeta>> output_metas(const OpCall& call);

// Returns the outputs of common reductions, matrix products, samplers, softmax and log_softmax with their
// backwards, native_layer_norm with its backward, cat, cumsum, tril and triu. Where devices differ, the
// outputs are those of a GPU (statistics of half precision inputs are float). Returns nullopt for other
// operators, and for arguments that the operator itself has to check.
std::optional<std::vector<std::optional<TensorMeta>>> analytic_metas(const OpCall& call);

}  // namespace funcol
