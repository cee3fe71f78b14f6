// Gradients of the out-of-place collectives.
//
// x_r, y_r: input and output on rank r; g_r: the gradient of y_r. Each rank differentiates its own sum; the
// gradients are those of the total over all ranks, so that every rank has to run backward, as it ran forward.
//
//   all_reduce       sum: dx = sum of all g; avg: their mean; premul_sum(f): f_r times their sum
//                    min, max: their sum where x is the extremum, shared equally between ranks that tie;
//                    NaN counts as the extremum where the result is NaN
//                    product: their sum times the product of all other ranks' x
//   reduce_scatter   the same, of g gathered from the ranks: sum: dx = all_gather(g)
//   all_gather       dx = reduce_scatter(g, sum)
//   all_to_all       dx = all_to_all(g) with the splits swapped; permute: the inverse permutation
//   broadcast(src)   dx = reduce(g, sum) on src, zeros elsewhere; reduce: dx = broadcast(g), by the op's rule
//   scatter(src)     dx = gather(g) on src, zeros elsewhere; gather: dx = scatter(g)
//
// The collectives of the backward pass are funcol ops themselves: their results may be pending, also in
// .grad, and they are differentiable in turn. PyTorch counterpart: the register_autograd calls of
// torch.distributed._functional_collectives.
//
// Reduce ops without a rule raise NotImplementedError in backward. Below, arguments are as in calls.h.
#pragma once

#include "ops/calls.h"

namespace funcol::autograd {

using c10::IValue;
using call::SplitSizes;

// True if a call with these inputs is to be recorded.
bool needs_gradient(at::TensorList inputs);

// Each runs the collective on inputs that need a gradient, and records it.
at::Tensor all_reduce(const at::Tensor& input, const IValue& reduce_op, const IValue& group);
std::vector<at::Tensor> all_reduce_coalesced(at::TensorList inputs, const IValue& reduce_op,
                                             const IValue& group);
at::Tensor all_gather(const at::Tensor& input, int64_t dim, const IValue& group, SplitSizes split_sizes = {});
std::vector<at::Tensor> all_gather_coalesced(at::TensorList inputs, const IValue& group);
at::Tensor reduce_scatter(const at::Tensor& input, const IValue& reduce_op, int64_t dim, const IValue& group,
                          SplitSizes split_sizes = {});
std::vector<at::Tensor> reduce_scatter_coalesced(at::TensorList inputs, const IValue& reduce_op,
                                                 at::IntArrayRef dims, const IValue& group);
at::Tensor all_to_all(const at::Tensor& input, c10::SymIntArrayRef output_splits,
                      c10::SymIntArrayRef input_splits, const IValue& group);
at::Tensor permute(const at::Tensor& input, at::IntArrayRef destinations, const IValue& group);
at::Tensor broadcast(const at::Tensor& input, int64_t source, const IValue& group);
at::Tensor reduce(const at::Tensor& input, const IValue& reduce_op, int64_t destination, const IValue& group);
at::Tensor scatter(const at::Tensor& input, int64_t source, int64_t dim, const IValue& group,
                   SplitSizes split_sizes = {});
at::Tensor gather(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                  SplitSizes split_sizes = {});

}  // namespace funcol::autograd
