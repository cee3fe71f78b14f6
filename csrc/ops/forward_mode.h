// Forward-mode differentiation, which collectives refuse.
//
// Each rank would have to know which tensors of the others have tangents, before it could send its own. A
// result without its tangent would be a derivative of zero.
#pragma once

#include <ATen/core/Tensor.h>

namespace funcol {

// NotImplementedError if one of the tensors, which may be undefined, has a tangent. Of a tensor that
// transforms of functorch wrapped, this sees the outermost one.
void check_no_tangents(at::TensorList tensors, const char* op);

}  // namespace funcol
