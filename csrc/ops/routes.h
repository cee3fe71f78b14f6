// Which way a call of a funcol op goes.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "async/layers.h"

namespace funcol {

// Runs a collective of `inputs` with nothing recorded: composed() where a layer watches, so that it sees ops
// it knows; else called(), by the device's kernel.
template <typename Composed, typename Called>
auto run_unrecorded(at::TensorList inputs, const Composed& composed, const Called& called) {
  if (has_active_layers() || std::any_of(inputs.begin(), inputs.end(), belongs_to_layer)) {
    return composed();
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return called();
}

}  // namespace funcol
