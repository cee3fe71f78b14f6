// The gradient of each reduce op, for one rank's input.
#pragma once

#include "ops/gradient.h"

namespace funcol::autograd {

// The gradients of the results are summed over the ranks first. Both ways of doing so leave nothing to be
// done for an "avg" afterwards, so that the sum may stay pending.
//
// An all_reduce with this reduce op sums them.
IValue totalling_op(const IValue& reduce_op, const char* op);
// A gather or broadcast takes the gradient of one result to the ranks: this one.
at::Tensor weighted(const at::Tensor& gradient, const IValue& reduce_op, const IValue& group, const char* op);

// The gradient of a reduction over the ranks of `group`, for this rank's `input`.
//
// `total` is the sum, over the ranks, of the gradients of the results that this input went into, made by one
// of the functions above, and `result` the reduced values; both have the shape of `input`. Differentiable in
// `total`, and for product in `input` too; `input` and `result` are read for min, max and product only.
at::Tensor reduction_gradient(const at::Tensor& total, const at::Tensor& input, const at::Tensor& result,
                              const IValue& reduce_op, const IValue& group, const char* op);

// reduction_gradient() of each of `totals`. `inputs` and `results` are empty where the rule does not read
// them.
Tensors reduction_gradients(Tensors totals, const Tensors& inputs, const Tensors& results,
                            const IValue& reduce_op, const IValue& group, const char* op);

// True for the reduce ops whose rule looks at the values that were reduced: min, max, product.
bool depends_on_values(const c10d::ReduceOp& reduce_op);
bool depends_on_values(const IValue& reduce_op, const char* op);

}  // namespace funcol::autograd
