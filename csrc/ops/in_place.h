// Collectives that write into tensors of the caller and are finished when they return, gradients included:
// what the forms of torch.distributed's in-place functions do.
//
// Each is false, and has done nothing, where a backend cannot write into the destinations as they are, or
// where autograd has to know more of them than that they are overwritten: strided ones, of another dtype or
// device than what comes, in the memory of an input, on the meta device, recorded views, reduce ops whose
// gradients depend on values, ... There the caller copies the result of the functional collective.
//
// Shapes have been checked. Errors are those of the functional collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/process_group.h"
#include "comm/reduce_op.h"

namespace funcol {

bool all_reduce_into(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op, const GroupPtr& group);
bool broadcast_into(const at::Tensor& tensor, int64_t source, const GroupPtr& group);

// Along dim 0. Only the numbers of elements of `out` and `input` have to fit.
bool all_gather_into(const at::Tensor& out, const at::Tensor& input, const GroupPtr& group);
bool reduce_scatter_into(const at::Tensor& out, const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                         const GroupPtr& group);

// One tensor a rank, all of the shape of the other argument.
bool all_gather_into_list(at::TensorList outs, const at::Tensor& input, const GroupPtr& group);
bool reduce_scatter_list_into(const at::Tensor& out, at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                              const GroupPtr& group);

}  // namespace funcol
