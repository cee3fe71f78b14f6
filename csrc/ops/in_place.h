// The differentiable forms of torch.distributed's in-place functions: collectives that write into tensors of
// the caller and have finished when they return.
//
// Each function returns false, and has done nothing, if a backend cannot write into the destinations as they
// are, or if autograd has to know more than that they are overwritten: destinations that are strided, of
// another dtype or device than the input, in the input's memory, on the meta device or recorded views, and
// reduce ops whose gradients depend on values. The caller then copies the result of the functional
// collective.
//
// The caller has checked the shapes. Errors are those of the functional collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/group_ref.h"
#include "comm/reduce_op.h"

namespace funcol {

bool all_reduce_into(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op, const GroupPtr& group);
bool broadcast_into(const at::Tensor& tensor, int64_t source, const GroupPtr& group);

// Gathers or scatters along dim 0. Only the numbers of elements of `out` and `input` have to fit.
bool all_gather_into(const at::Tensor& out, const at::Tensor& input, const GroupPtr& group);
bool reduce_scatter_into(const at::Tensor& out, const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                         const GroupPtr& group);

// Takes one tensor per rank, all of the shape of the other argument.
bool all_gather_into_list(at::TensorList outs, const at::Tensor& input, const GroupPtr& group);
bool reduce_scatter_list_into(const at::Tensor& out, at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                              const GroupPtr& group);

}  // namespace funcol
