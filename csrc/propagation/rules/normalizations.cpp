// Normalization layers and their gradients.
#include "propagation/rules/row_list.h"
#include "propagation/rules/rule_table.h"

namespace funcol::normalization_rules {
namespace {

// Returns the number of dims before the normalized ones.
int64_t num_outer_dims(const OpCall& call) {
  return call.tensor("input").num_dims() -
         static_cast<int64_t>(call.arg("normalized_shape").integers().size());
}

Rows layer_norm(const OpCall& call) {
  RowList rows(call);
  for (int64_t dim = 0; dim < num_outer_dims(call); ++dim) {
    rows.add_same_placement(any_shard(dim), {"input"});
  }
  return rows.allowing_empty_shards();
}

// Returns a row for each of the first `num_dims` dims. The gradients of weight and bias, the outputs after
// that of the input, are sums over these dims.
Rows norm_backward(const OpCall& call, int64_t num_dims) {
  RowList rows(call);
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    const auto shard = any_shard(dim);
    std::vector<Placement> outputs(call.outputs.size(), partial());
    outputs.at(0) = shard;
    rows.add(outputs, {{"grad_out", shard}, {"input", shard}, {"mean", shard}, {"rstd", shard}});
  }
  rows.add_arithmetic_partials(kLinearOps, {"grad_out"});
  return rows.allowing_empty_shards();
}

Rows layer_norm_backward(const OpCall& call) { return norm_backward(call, num_outer_dims(call)); }

// Returns rows that shard the batch alone.
Rows group_norm(const OpCall& call) {
  RowList rows(call);
  rows.add_same_placement(any_shard(0), {"input"});
  return rows.allowing_empty_shards();
}

Rows group_norm_backward(const OpCall& call) { return norm_backward(call, 1); }

// Returns the placement of a tensor if channels, dim 1 of images, are sharded. Statistics and weights have
// one number per channel. A workspace, and statistics that were not kept, have no channels.
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

// Adds the rows for given statistics, not those of the batch: all elements are independent.
void add_rows_of_given_statistics(const OpCall& call, RowList& rows) {
  std::vector<Placement> outputs(call.outputs.size(), replicate());
  for (int64_t dim = 0; dim < call.tensor("input").num_dims(); ++dim) {
    if (dim != 1) {
      outputs.at(0) = any_shard(dim);
      rows.add(outputs, {{"input", any_shard(dim)}});
    }
  }
}

// Returns true if every rank has channels: the operator does not run without any.
bool all_have_channels(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const size_t input = call.arg("input").tensor();
  return leaves_none_empty(composition.inputs[input], mesh, 1, call.tensors[input].shape.at(1));
}

Rows batch_norm_with_given_statistics(const OpCall& call) {
  RowList rows(call);
  add_channel_row(call, rows);
  add_rows_of_given_statistics(call, rows);
  return rows.allowing_empty_shards(all_have_channels);
}

Rows batch_norm(const OpCall& call) {
  if (call.has_arg("training") && !call.arg("training").boolean() && has_tensor(call, "running_mean")) {
    return batch_norm_with_given_statistics(call);
  }
  RowList rows(call);
  add_channel_row(call, rows);
  return rows.refusing_empty_shards();
}

Rows batch_norm_backward(const OpCall& call) {
  RowList rows(call);
  add_channel_row(call, rows);
  rows.add_arithmetic_partials(kLinearOps, {"grad_out"});
  return rows.refusing_empty_shards();
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::native_layer_norm", "aten::_fused_rms_norm"}, layer_norm);
  table.add_operators({"aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward"},
                      layer_norm_backward);
  table.add_operators({"aten::native_group_norm"}, group_norm);
  table.add_operators({"aten::native_group_norm_backward"}, group_norm_backward);
  table.add_operators({"aten::native_batch_norm", "aten::_native_batch_norm_legit",
                       "aten::_native_batch_norm_legit_functional", "aten::_batch_norm_with_update",
                       "aten::_batch_norm_with_update_functional"},
                      batch_norm);
  table.add_operators({"aten::_native_batch_norm_legit_no_training"}, batch_norm_with_given_statistics);
  table.add_operators({"aten::native_batch_norm_backward"}, batch_norm_backward);
}

}  // namespace funcol::normalization_rules
