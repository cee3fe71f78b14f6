// Losses: the negative log likelihood, and those that are made element by element and then reduced.
#include "propagation/rules/families.h"
#include "propagation/rules/pointwise.h"
#include "propagation/rules/rows.h"

namespace funcol {
namespace {

// torch.nn's reductions, as its operators number them.
constexpr int64_t kNone = 0;
constexpr int64_t kMean = 1;
constexpr int64_t kSum = 2;

// The dim of the classes, which every rank needs whole: the target has no such dim.
int64_t class_dim(const TensorMeta& self) { return self.num_dims() >= 2 ? 1 : 0; }

// (output, total_weight) of nll_loss(self, target, weight, reduction).
Rows nll_loss(const OpCall& call) {
  RowList rows(call);
  const auto& self = call.tensor("self");
  const int64_t reduction = call.arg("reduction").integer();
  for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
    if (dim == class_dim(self) || reduction == kMean) {
      continue;
    }
    const auto of_target = any_shard(dim < class_dim(self) ? dim : dim - 1);
    const std::vector<Placement> outputs =
        reduction == kSum ? std::vector{partial(), partial()} : std::vector{of_target, replicate()};
    rows.add(outputs, inputs_by_name(call, {{"self", any_shard(dim)}, {"target", of_target}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// The total weight is read for means alone: otherwise it may stay pending.
Rows nll_loss_backward(const OpCall& call) {
  RowList rows(call);
  const auto& self = call.tensor("self");
  const int64_t reduction = call.arg("reduction").integer();
  std::vector<Placement> total_weights{replicate()};
  if (reduction != kMean) {
    total_weights.push_back(partial());
  }
  for (const auto& total_weight : total_weights) {
    for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
      if (dim == class_dim(self)) {
        continue;
      }
      const auto of_target = any_shard(dim < class_dim(self) ? dim : dim - 1);
      rows.add(any_shard(dim),
               inputs_by_name(call, {{"grad_output", reduction == kNone ? of_target : replicate()},
                                     {"self", any_shard(dim)},
                                     {"target", of_target},
                                     {"total_weight", total_weight}}));
    }
    for (const auto op : kLinearOps) {
      rows.add_arithmetic(
          partial(op), inputs_by_name(call, {{"grad_output", partial(op)}, {"total_weight", total_weight}}));
    }
  }
  if (reduction != kMean) {
    rows.add(replicate(), inputs_by_name(call, {{"total_weight", partial()}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

bool all_cut_evenly(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    for (int64_t dim = 0; dim < call.tensors[i].num_dims(); ++dim) {
      if (!is_cut_evenly(composition.inputs[i], mesh, dim, call.tensors[i].shape[dim])) {
        return false;
      }
    }
  }
  return true;
}

// mse_loss(self, target, reduction) and its like: the mean of means is that of all where every rank has as
// many elements.
Rows elementwise_loss(const OpCall& call) {
  RowList cut(call);
  add_broadcast_rows(call, cut);
  Rows result{.rows = cut.take(), .allows_empty_shards = true, .is_legal = nullptr};
  const int64_t reduction = call.arg("reduction").integer();
  if (reduction != kNone) {
    for (auto& row : result.rows) {
      row.outputs = {partial(reduction == kMean ? PartialOp::kAvg : PartialOp::kSum)};
    }
  }
  if (reduction == kMean) {
    result.is_legal = all_cut_evenly;
  }
  return result;
}

// The gradient of a mean is divided by the number of elements that the operator sees: these have to be all.
Rows elementwise_loss_backward(const OpCall& call) {
  RowList rows(call);
  if (call.arg("reduction").integer() != kMean) {
    add_broadcast_rows(call, rows);
  }
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"grad_output", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

}  // namespace

void add_loss_rules(RuleTable& table) {
  table.add_all_overloads({"aten::nll_loss_forward", "aten::nll_loss2d_forward"}, nll_loss);
  table.add_all_overloads({"aten::nll_loss_backward", "aten::nll_loss2d_backward"}, nll_loss_backward);
  table.add_all_overloads(
      {"aten::binary_cross_entropy", "aten::binary_cross_entropy_with_logits", "aten::huber_loss",
       "aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss"},
      elementwise_loss);
  table.add_all_overloads(
      {"aten::binary_cross_entropy_backward", "aten::huber_loss_backward", "aten::mse_loss_backward",
       "aten::smooth_l1_loss_backward", "aten::soft_margin_loss_backward"},
      elementwise_loss_backward);
}

}  // namespace funcol
