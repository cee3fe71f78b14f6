// Gradients of the collectives: attaches results to autograd's graph, by rules.
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
//   all_to_all       dx = all_to_all(g) with the splits swapped, of one tensor and of a list; permute: the
//                    inverse permutation
//   broadcast(src)   dx = reduce(g, sum) on src, zeros elsewhere; reduce: dx = broadcast(g), by the op's rule
//   scatter(src)     dx = gather(g) on src, zeros elsewhere; gather: dx = scatter(g)
//
// The collectives of the backward pass are funcol operators themselves: their results may be pending, also in
// .grad, and they are differentiable in turn. A coalesced collective has one collective in its backward pass.
// Reduce ops without a rule raise NotImplementedError in backward. PyTorch counterpart: the register_autograd
// calls of torch.distributed._functional_collectives.
#pragma once

#include "comm/reduce_op.h"
#include "ops/collective_node.h"

namespace funcol::autograd {

using c10::IValue;
using Data = RuleNode::Data;
using Rule = RuleNode::Rule;
using Tensors = torch::autograd::variable_list;
using Values = RuleNode::Values;

// True if a call with these inputs is to be recorded.
bool needs_gradient(at::TensorList inputs);

// Attaches the outputs of collective `op`, which was run unrecorded, to its inputs: backward calls `rule`
// with the gradients of the outputs and `data`, and with both tensors where it `needs_values`. Returns the
// outputs.
Tensors record(at::TensorList inputs, Tensors outputs, const char* op, Rule rule, Data data,
               bool needs_values = false);
at::Tensor record(const at::Tensor& input, const at::Tensor& output, const char* op, Rule rule, Data data,
                  bool needs_values = false);

// split_sizes among the data of a rule, where an empty list stands for none.
IValue saved_sizes(at::OptionalSymIntArrayRef split_sizes);
class SavedSizes {
 public:
  explicit SavedSizes(const IValue& saved) : sizes_(saved.toSymIntVector()) {}
  bool has_value() const { return !sizes_.empty(); }
  operator at::OptionalSymIntArrayRef() const {  // NOLINT(google-explicit-constructor)
    return sizes_.empty() ? at::OptionalSymIntArrayRef() : at::OptionalSymIntArrayRef(sizes_);
  }

 private:
  std::vector<c10::SymInt> sizes_;
};

// Zeros of shape `sizes`, expanded from one element: the gradient of a rank that takes no part.
//
// The zeros depend on `empty`, a result without elements, where somebody records or traces: the rank's part
// in the collective of a second differentiation hangs on that, and its place behind the gradients in a traced
// graph.
at::Tensor zeros_after(const at::Tensor& empty, c10::SymIntArrayRef sizes);

}  // namespace funcol::autograd
