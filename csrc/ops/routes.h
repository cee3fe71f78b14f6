// Which way a call of a funcol op goes.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "async/layers.h"

namespace funcol {

// Runs a collective of `inputs` with nothing recorded: by `composed` where a layer watches, so that it sees
// ops it knows; else by `called`, the device's kernel. Both are functions of `arguments`.
template <typename Composed, typename Called, typename... Arguments>
auto run_unrecorded(at::TensorList inputs, const Composed& composed, const Called& called,
                    const Arguments&... arguments) {
  if (has_active_layers() || std::ranges::any_of(inputs, belongs_to_layer)) {
    return composed(arguments...);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return called(arguments...);
}

}  // namespace funcol
