// How a reduction's gradient reaches one rank's input.
#pragma once

#include "comm/reduce_op.h"
#include "ops/calls.h"

namespace funcol::autograd {

using c10::IValue;

// Gradients of the results are summed over the ranks first, in one of two ways that leave nothing to be done
// after an "avg", so that the sum may stay pending:
// the reduce op of the all_reduce that sums them,
IValue totalling_op(const IValue& reduce_op, const char* op);
// or the gradient of one result as a gather or broadcast takes it to the ranks.
at::Tensor weighted(const at::Tensor& gradient, const IValue& reduce_op, const IValue& group, const char* op);

// The gradient of a reduction over the ranks of `group`, for this rank's `input`.
//
// `total` is the sum, over the ranks, of the gradients of the results that this input went into, made by one
// of the functions above, and `result` the reduced values; both have the shape of `input`. Differentiable in
// `total`, and for product in `input` too; `input` and `result` are read for min, max and product only.
at::Tensor reduction_gradient(const at::Tensor& total, const at::Tensor& input, const at::Tensor& result,
                              const IValue& reduce_op, const IValue& group, const char* op);

// True for the ops whose rule looks at the values that were reduced: min, max, product.
bool depends_on_values(const c10d::ReduceOp& reduce_op);
bool depends_on_values(const IValue& reduce_op, const char* op);

}  // namespace funcol::autograd
