// What some operators return, worked out here: their Meta kernels are written in Python and slow.
#pragma once

#include <optional>
#include <vector>

#include "propagation/op_call.h"

namespace funcol {

// The outputs of common reductions, of products of matrices, of softmax and log_softmax and their backwards,
// of native_layer_norm and its backward, cat, cumsum, tril and triu; as on a GPU where devices differ
// (statistics of half precision inputs are float). Nothing for other operators, and for arguments that are
// better refused by the operator itself.
std::optional<std::vector<std::optional<TensorMeta>>> known_outputs(const OpCall& call);

}  // namespace funcol
