// Losses: the negative log likelihood, and losses that reduce the results of single elements.
#include "propagation/rules/pointwise.h"
#include "propagation/rules/row_list.h"
#include "propagation/rules/rule_table.h"

namespace funcol::loss_rules {
namespace {

// The values of `reduction`: torch.nn.functional's numbers.
constexpr int64_t kNone = 0;
constexpr int64_t kMean = 1;
constexpr int64_t kSum = 2;

// Returns the dim of the classes, which every rank needs in full. The target has no such dim.
int64_t class_dim(const TensorMeta& self) { return self.num_dims() >= 2 ? 1 : 0; }

// Returns the shards of self along dims other than the classes, each with its shard of the target.
std::vector<std::pair<Placement, Placement>> shards_of_self_and_target(const TensorMeta& self) {
  std::vector<std::pair<Placement, Placement>> shards;
  for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
    if (dim != class_dim(self)) {
      shards.emplace_back(any_shard(dim), any_shard(dim < class_dim(self) ? dim : dim - 1));
    }
  }
  return shards;
}

// Returns the rows of nll_loss(self, target, weight, reduction) -> (output, total_weight).
Rows nll_loss(const OpCall& call) {
  RowList rows(call);
  const int64_t reduction = call.arg("reduction").integer();
  if (reduction == kMean) {
    return {};
  }
  for (const auto& [of_self, of_target] : shards_of_self_and_target(call.tensor("self"))) {
    const std::vector<Placement> outputs =
        reduction == kSum ? std::vector{partial(), partial()} : std::vector{of_target, replicate()};
    rows.add(outputs, {{"self", of_self}, {"target", of_target}});
  }
  return rows.allowing_empty_shards();
}

// Returns the rows of the gradient. Only that of a mean reads the total weight, which else may stay partial.
Rows nll_loss_backward(const OpCall& call) {
  RowList rows(call);
  const int64_t reduction = call.arg("reduction").integer();
  std::vector<Placement> total_weights{replicate()};
  if (reduction != kMean) {
    total_weights.push_back(partial());
  }
  for (const auto& total_weight : total_weights) {
    for (const auto& [of_self, of_target] : shards_of_self_and_target(call.tensor("self"))) {
      rows.add(of_self, {{"grad_output", reduction == kNone ? of_target : replicate()},
                         {"self", of_self},
                         {"target", of_target},
                         {"total_weight", total_weight}});
    }
    for (const auto op : kLinearOps) {
      rows.add_arithmetic(partial(op), {{"grad_output", partial(op)}, {"total_weight", total_weight}});
    }
  }
  if (reduction != kMean) {
    rows.add(replicate(), {{"total_weight", partial()}});
  }
  return rows.allowing_empty_shards();
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

// Returns the rows of mse_loss(self, target, reduction) and similar losses. The mean is the average of the
// ranks' means if all ranks have equally many elements.
Rows elementwise_loss(const OpCall& call) {
  RowList rows(call);
  add_broadcast_rows(call, rows);
  const int64_t reduction = call.arg("reduction").integer();
  auto result = rows.allowing_empty_shards(reduction == kMean ? all_cut_evenly : nullptr);
  if (reduction != kNone) {
    for (auto& row : result.rows) {
      row.outputs = {partial(reduction == kMean ? PartialOp::kAvg : PartialOp::kSum)};
    }
  }
  return result;
}

// Returns the rows of the gradient. A mean divides it by the number of elements, so the operator must see
// all.
Rows elementwise_loss_backward(const OpCall& call) {
  RowList rows(call);
  if (call.arg("reduction").integer() != kMean) {
    add_broadcast_rows(call, rows);
  }
  rows.add_arithmetic_partials(kLinearOps, {"grad_output"});
  return rows.allowing_empty_shards();
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::nll_loss_forward", "aten::nll_loss2d_forward"}, nll_loss);
  table.add_operators({"aten::nll_loss_backward", "aten::nll_loss2d_backward"}, nll_loss_backward);
  table.add_operators(
      {"aten::binary_cross_entropy", "aten::binary_cross_entropy_with_logits", "aten::huber_loss",
       "aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss"},
      elementwise_loss);
  table.add_operators(
      {"aten::binary_cross_entropy_backward", "aten::huber_loss_backward", "aten::mse_loss_backward",
       "aten::smooth_l1_loss_backward", "aten::soft_margin_loss_backward"},
      elementwise_loss_backward);
}

}  // namespace funcol::loss_rules
