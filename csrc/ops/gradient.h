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

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/call_site.h"
#include "comm/reduce_op.h"

namespace funcol::autograd {

// A node that makes the gradients of all inputs from the gradients of all outputs, by a rule.
//
// The node is as differentiable as the rule. An unused output has a gradient of zeros, since ranks must agree
// on what they send. To compiled autograd the node is opaque.
class RuleNode final : public torch::autograd::Node {
 public:
  using Tensors = torch::autograd::variable_list;
  using Data = std::vector<c10::IValue>;
  struct Values {
    Tensors inputs;
    Tensors outputs;
  };
  // `values` is empty unless save() was called; `data` is the node's. A rule has no state of its own, since
  // compiled autograd runs one rule for many nodes. GradientCollectives exist while it runs.
  using Rule = Tensors (*)(const Tensors& gradients, const Values& values, const Data& data);

  // Takes `op` as in messages, such as "all_reduce_coalesced"; the string must never be destroyed.
  RuleNode(const char* op, Rule rule, Data data) : op_(op), rule_(rule), data_(std::move(data)) {}

  // Saves the values on which the rule depends. To be called when this node is the outputs' history.
  void save(const Tensors& inputs, const Tensors& outputs);

  Tensors apply(Tensors&& gradients) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  Tensors apply_with_saved(const Tensors& gradients,
                           torch::dynamo::autograd::SwapSavedVariables& saved) override;
  void release_variables() override;
  std::string name() const override { return std::string("funcol::") + op_; }

 private:
  Values unpack_values();
  std::vector<torch::autograd::VariableInfo> output_infos() const;
  void check_not_released() const;

  std::mutex mutex_;
  const char* op_;
  Rule rule_;
  Data data_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<torch::autograd::SavedVariable> outputs_;
  Text module_ = current_module();
  bool is_released_ = false;
};

using c10::IValue;
using Data = RuleNode::Data;
using Rule = RuleNode::Rule;
using Tensors = torch::autograd::variable_list;
using Values = RuleNode::Values;

// Returns true if a call with these inputs is to be recorded.
bool needs_gradient(at::TensorList inputs);

// Attaches the outputs of collective `op`, which was run unrecorded, to its inputs: backward calls `rule`
// with the gradients of the outputs and `data`, and with inputs and outputs if it `needs_values`. Returns the
// outputs.
Tensors record(at::TensorList inputs, Tensors outputs, const char* op, Rule rule, Data data,
               bool needs_values = false);
at::Tensor record(const at::Tensor& input, const at::Tensor& output, const char* op, Rule rule, Data data,
                  bool needs_values = false);

// Returns split_sizes for the data of a rule, in which an empty list means nullopt.
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

// Returns an argument of a collective for the data of a rule.
template <typename Argument>
IValue saved(const Argument& argument) {
  if constexpr (std::is_same_v<Argument, at::OptionalSymIntArrayRef>) {
    return saved_sizes(argument);
  } else {
    return argument;
  }
}

// Returns zeros of shape `sizes`, expanded from one element: the gradient of a rank that takes no part.
//
// While autograd records or a layer traces, the zeros depend on `empty`, a result without elements: this
// gives the rank its part in the collective of a second differentiation, and its place behind the gradients
// in a traced graph.
at::Tensor zeros_after(const at::Tensor& empty, c10::SymIntArrayRef sizes);

// The gradients of each reduce op, for one rank's input.

// Returns the reduce op with which an all_reduce sums the gradients of the results over the ranks.
//
// This sum comes first. Neither way of making it, here and in weighted(), leaves anything to be done for an
// "avg" afterwards, so that the sum may stay pending.
IValue totalling_op(const IValue& reduce_op, const char* op);
// Returns the gradient of one result as a gather or broadcast takes it to the ranks: for "avg", its share.
at::Tensor weighted(const at::Tensor& gradient, const IValue& reduce_op, const IValue& group, const char* op);

// Returns the gradient of a reduction over the ranks of `group`, for this rank's `input`.
//
// `total` is the sum, over the ranks, of the gradients of the results that this input went into, made by one
// of the functions above, and `result` the reduced values; both have the shape of `input`. The gradient is
// differentiable in `total`, and for product in `input` too; `input` and `result` are read for min, max and
// product only.
at::Tensor reduction_gradient(const at::Tensor& total, const at::Tensor& input, const at::Tensor& result,
                              const IValue& reduce_op, const IValue& group, const char* op);

// Returns reduction_gradient() for each of `totals`. `inputs` and `results` are empty if the rule does not
// read them.
Tensors reduction_gradients(Tensors totals, const Tensors& inputs, const Tensors& results,
                            const IValue& reduce_op, const IValue& group, const char* op);

// Returns true for the reduce ops whose rule reads the values that were reduced: min, max, product.
bool depends_on_values(const c10d::ReduceOp& reduce_op);

}  // namespace funcol::autograd
