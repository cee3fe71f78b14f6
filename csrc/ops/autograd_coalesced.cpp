// Gradients of the coalesced collectives: one collective in the backward pass, too.
//
// torch::autograd::Function does not look into lists of tensors, so these have a node of their own.
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "async/held_memory.h"
#include "comm/process_group.h"
#include "compat/autograd_node.h"
#include "ops/autograd.h"
#include "ops/composed.h"
#include "ops/reduction_rules.h"
#include "ops/routes.h"
#include "ops/rule_node.h"

namespace funcol::autograd {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = torch::autograd::variable_list;

// Attaches `outputs` to `inputs`.
Tensors recorded(TensorList inputs, Tensors outputs, const char* op, bool saves_values, RuleNode::Rule rule,
                 RuleNode::Data data) {
  const auto node = compat::make_node<RuleNode>(op, rule, std::move(data));
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  torch::autograd::set_history(outputs, node);
  if (saves_values) {
    node->save(inputs.vec(), outputs);
  }
  return outputs;
}

// For each tensor, its gradient from the summed or gathered one.
Tensors apply_reduction_rule(Tensors totals, const Tensors& inputs, const Tensors& results,
                             const IValue& reduce_op, const IValue& group, const char* op) {
  for (size_t i = 0; i < totals.size(); ++i) {
    totals[i] = inputs.empty() ? reduction_gradient(totals[i], {}, {}, reduce_op, group, op)
                               : reduction_gradient(totals[i], inputs[i], results[i], reduce_op, group, op);
  }
  return totals;
}

// The wholes of which `parts` are the ranks' own: by one gather of all where they go along dim 0, else one
// each.
Tensors gathered(const Tensors& parts, at::IntArrayRef dims, const IValue& group) {
  if (std::ranges::all_of(dims, [](int64_t dim) { return dim == 0; })) {
    const auto num_ranks = group_from_ivalue(group, "reduce_scatter_tensor_coalesced")->getSize();
    return call::all_gather_into_tensor_coalesced(parts, num_ranks, group);
  }
  Tensors wholes;
  for (size_t i = 0; i < parts.size(); ++i) {
    wholes.push_back(call::all_gather_along_dim(parts[i], dims[i], group));
  }
  return wholes;
}

// This rank's parts of the sums of `wholes`: by one reduce_scatter where they have one dtype, else one each.
Tensors reduced_parts(const Tensors& wholes, at::IntArrayRef dims, const IValue& group) {
  const auto is_like_first = [&](const Tensor& whole) {
    return whole.scalar_type() == wholes[0].scalar_type();
  };
  if (std::ranges::all_of(wholes, is_like_first)) {
    return call::reduce_scatter_along_dims_coalesced(wholes, "sum", dims, group);
  }
  Tensors parts;
  for (size_t i = 0; i < wholes.size(); ++i) {
    parts.push_back(call::reduce_scatter_along_dim(wholes[i], "sum", dims[i], group, {}));
  }
  return parts;
}

}  // namespace

Tensors all_reduce_coalesced(TensorList inputs, const IValue& reduce_op, const IValue& group) {
  static constexpr auto kOp = "all_reduce_coalesced";
  auto outputs = run_unrecorded(inputs, composed::all_reduce_coalesced, call::all_reduce_coalesced, inputs,
                                reduce_op, group);
  const auto rule = [](const Tensors& gradients, const RuleNode::Values& values, const RuleNode::Data& data) {
    const auto& reduce_op = data[0];
    const auto& group = data[1];
    const GradientCollectives collectives;
    auto totals = call::all_reduce_coalesced(gradients, totalling_op(reduce_op, kOp), group);
    return apply_reduction_rule(std::move(totals), values.inputs, values.outputs, reduce_op, group, kOp);
  };
  return recorded(inputs, std::move(outputs), kOp, depends_on_values(reduce_op, kOp), rule,
                  {reduce_op, group});
}

Tensors all_gather_coalesced(TensorList inputs, const IValue& group) {
  constexpr auto kOp = "all_gather_into_tensor_coalesced";
  const auto num_ranks = group_from_ivalue(group, kOp)->getSize();
  auto outputs = run_unrecorded(inputs, composed::all_gather_into_tensor_coalesced,
                                call::all_gather_into_tensor_coalesced, inputs, num_ranks, group);
  c10::List<bool> are_scalars;
  for (const auto& input : inputs) {
    are_scalars.push_back(input.dim() == 0);
  }
  const auto rule = [](const Tensors& gradients, const RuleNode::Values&, const RuleNode::Data& data) {
    const auto are_scalars = data[0].toBoolList();
    const std::vector<int64_t> dims(gradients.size(), 0);
    const GradientCollectives collectives;
    const auto wholes = GradientCollectives::unshared(gradients);
    auto own = reduced_parts(wholes, dims, data[1]);
    for (size_t i = 0; i < own.size(); ++i) {
      own[i] = are_scalars[i] ? own[i].squeeze(0) : own[i];
    }
    return own;
  };
  return recorded(inputs, std::move(outputs), kOp, /*saves_values=*/false, rule, {are_scalars, group});
}

Tensors reduce_scatter_coalesced(TensorList inputs, const IValue& reduce_op, at::IntArrayRef dims,
                                 const IValue& group) {
  static constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  auto outputs = run_unrecorded(inputs, composed::reduce_scatter_along_dims_coalesced,
                                call::reduce_scatter_along_dims_coalesced, inputs, reduce_op, dims, group);
  const auto rule = [](const Tensors& gradients, const RuleNode::Values& values, const RuleNode::Data& data) {
    const auto& reduce_op = data[0];
    const auto& group = data[1];
    const auto dims = data[2].toIntVector();
    const GradientCollectives collectives;
    Tensors parts;
    for (const auto& gradient : gradients) {
      parts.push_back(weighted(GradientCollectives::unshared(gradient), reduce_op, group, kOp));
    }
    const auto saved = GradientCollectives::unshared(values.outputs);
    const auto results = saved.empty() ? Tensors() : gathered(saved, dims, group);
    return apply_reduction_rule(gathered(parts, dims, group), values.inputs, results, reduce_op, group, kOp);
  };
  return recorded(inputs, std::move(outputs), kOp, depends_on_values(reduce_op, kOp), rule,
                  {reduce_op, group, dims});
}

}  // namespace funcol::autograd
