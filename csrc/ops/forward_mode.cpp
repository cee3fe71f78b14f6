#include "ops/forward_mode.h"

#include <algorithm>

namespace funcol {
namespace {

bool has_tangent(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr && tensor._fw_grad(/*level=*/0).defined();
}

}  // namespace

void check_no_tangents(at::TensorList tensors, const char* op) {
  const auto found = std::ranges::find_if(
      tensors, [](const at::Tensor& tensor) { return tensor.defined() && has_tangent(tensor); });
  TORCH_CHECK_NOT_IMPLEMENTED(
      found == tensors.end(), "funcol::", op, ": tensor ", found - tensors.begin(),
      " has a tangent, and collectives have no forward-mode derivative. Differentiate in reverse mode; or, "
      "if it is linear, call it on primal and tangent, and make a dual tensor of the two results.");
}

}  // namespace funcol
