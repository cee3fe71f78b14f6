// Layers that normalize, and their gradients.
#include <algorithm>

#include "propagation/rules/families.h"
#include "propagation/rules/rows.h"

namespace funcol {
namespace {

// Gradients are linear in what comes back; all else whole.
void add_linear_in_gradient(const OpCall& call, RowList& rows) {
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"grad_out", partial(op)}}));
  }
}

// How many dims go before those that are normalized together.
int64_t num_outer_dims(const OpCall& call) {
  return call.tensor("input").num_dims() -
         static_cast<int64_t>(call.arg("normalized_shape").integers().size());
}

// layer_norm, rms_norm: each index of the outer dims by itself.
Rows layer_norm(const OpCall& call) {
  RowList rows(call);
  for (int64_t dim = 0; dim < num_outer_dims(call); ++dim) {
    rows.add(any_shard(dim), inputs_by_name(call, {{"input", any_shard(dim)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// Outputs: the input's gradient, then those of weight and bias, which add up over the outer dims.
std::vector<Placement> gradients(const OpCall& call, const Placement& of_input) {
  std::vector<Placement> outputs(call.outputs.size(), partial());
  outputs.at(0) = of_input;
  return outputs;
}

Rows layer_norm_backward(const OpCall& call) {
  RowList rows(call);
  for (int64_t dim = 0; dim < num_outer_dims(call); ++dim) {
    const auto shard = any_shard(dim);
    rows.add(gradients(call, shard),
             inputs_by_name(call, {{"grad_out", shard}, {"input", shard}, {"mean", shard}, {"rstd", shard}}));
  }
  add_linear_in_gradient(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// Each image of a batch by itself.
Rows group_norm(const OpCall& call) {
  RowList rows(call);
  rows.add(any_shard(0), inputs_by_name(call, {{"input", any_shard(0)}}));
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

Rows group_norm_backward(const OpCall& call) {
  RowList rows(call);
  const auto shard = any_shard(0);
  rows.add(gradients(call, shard),
           inputs_by_name(call, {{"grad_out", shard}, {"input", shard}, {"mean", shard}, {"rstd", shard}}));
  add_linear_in_gradient(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// Where a tensor stands when channels, dim 1 of images, are cut: statistics and weights have one number a
// channel, other tensors (a workspace, statistics that were not kept) none.
Placement channel_shard(const TensorMeta& meta, int64_t num_channels) {
  if (meta.num_dims() >= 2) {
    return any_shard(1);
  }
  return meta.shape == std::vector<int64_t>{num_channels} && meta.dtype != Dtype::kUInt8 ? any_shard(0)
                                                                                         : replicate();
}

void add_channel_row(const OpCall& call, RowList& rows) {
  const int64_t num_channels = call.tensor("input").shape.at(1);
  std::vector<Placement> outputs;
  outputs.reserve(call.outputs.size());
  for (const auto& meta : call.outputs) {
    outputs.push_back(meta ? channel_shard(*meta, num_channels) : replicate());
  }
  std::vector<Placement> inputs;
  inputs.reserve(call.tensors.size());
  for (const auto& meta : call.tensors) {
    inputs.push_back(channel_shard(meta, num_channels));
  }
  rows.add(outputs, std::move(inputs));
}

// Statistics that are given, not taken of the batch, are the same for every element.
void add_rows_of_given_statistics(const OpCall& call, RowList& rows) {
  std::vector<Placement> outputs(call.outputs.size(), replicate());
  for (int64_t dim = 0; dim < call.tensor("input").num_dims(); ++dim) {
    if (dim != 1) {
      outputs.at(0) = any_shard(dim);
      rows.add(outputs, inputs_by_name(call, {{"input", any_shard(dim)}}));
    }
  }
}

Rows batch_norm(const OpCall& call) {
  RowList rows(call);
  add_channel_row(call, rows);
  if (call.has_arg("training") && !call.arg("training").boolean() && has_tensor(call, "running_mean")) {
    add_rows_of_given_statistics(call, rows);
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

Rows batch_norm_with_given_statistics(const OpCall& call) {
  RowList rows(call);
  add_channel_row(call, rows);
  add_rows_of_given_statistics(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

Rows batch_norm_backward(const OpCall& call) {
  RowList rows(call);
  add_channel_row(call, rows);
  add_linear_in_gradient(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

}  // namespace

void add_normalization_rules(RuleTable& table) {
  table.add_all_overloads({"aten::native_layer_norm", "aten::_fused_rms_norm"}, layer_norm);
  table.add_all_overloads({"aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward"},
                          layer_norm_backward);
  table.add_all_overloads({"aten::native_group_norm"}, group_norm);
  table.add_all_overloads({"aten::native_group_norm_backward"}, group_norm_backward);
  table.add_all_overloads({"aten::native_batch_norm", "aten::_native_batch_norm_legit",
                           "aten::_native_batch_norm_legit_functional", "aten::_batch_norm_with_update",
                           "aten::_batch_norm_with_update_functional"},
                          batch_norm);
  table.add_all_overloads({"aten::_native_batch_norm_legit_no_training"}, batch_norm_with_given_statistics);
  table.add_all_overloads({"aten::native_batch_norm_backward"}, batch_norm_backward);
}

}  // namespace funcol
