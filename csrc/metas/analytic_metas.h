// Output shapes, strides and dtypes of operators whose Meta kernels are written in Python, and slow.
#pragma once

#include <optional>
#include <vector>

#include "propagation/op_call.h"

namespace funcol {

// The outputs of common reductions, matrix products, softmax and log_softmax with their backwards,
// native_layer_norm with its backward, cat, cumsum, tril and triu. Where devices differ, the outputs are
// those of a GPU (statistics of half precision inputs are float). Nothing for other operators, and for
// arguments that the operator itself has to check.
std::optional<std::vector<std::optional<TensorMeta>>> analytic_metas(const OpCall& call);

}  // namespace funcol
