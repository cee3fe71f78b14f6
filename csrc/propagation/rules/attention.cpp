// Fused attention on [batch, heads, length, features]: batches and heads are independent.
#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol::attention_rules {
namespace {

constexpr int64_t kHeads = 1;
constexpr int64_t kNumDims = 4;

// Returns the summand of the scores, which may be broadcast to batches and heads; null if there is none.
const TensorMeta* score_bias(const OpCall& call) {
  for (const auto* name : {"attn_bias", "attn_mask"}) {
    if (has_tensor(call, name)) {
      return &call.tensor(name);
    }
  }
  return nullptr;
}

// Returns the placements of a call's inputs if `dim` is sharded.
std::vector<Placement> attention_inputs(const OpCall& call, int64_t dim) {
  const auto shard = any_shard(dim);
  const auto* bias = score_bias(call);
  const auto of_bias = bias != nullptr ? broadcast_shard(*bias, dim, kNumDims) : replicate();
  return inputs_by_name(tensor_names(call), {{"grad_out", shard},
                                             {"grad_out_", shard},
                                             {"query", shard},
                                             {"key", shard},
                                             {"value", shard},
                                             {"out", shard},
                                             {"logsumexp", shard},
                                             {"attn_bias", of_bias},
                                             {"attn_mask", of_bias}});
}

// Returns true if every rank has the keys of its queries. Groups of query heads may share a key head; even
// shards keep these groups on one rank.
bool keeps_groups_of_heads(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const size_t query = call.arg("query").tensor();
  const size_t key = call.arg("key").tensor();
  const int64_t num_heads = call.tensors[query].shape.at(kHeads);
  const int64_t num_keys = call.tensors[key].shape.at(kHeads);
  return num_heads == num_keys || (is_cut_evenly(composition.inputs[query], mesh, kHeads, num_heads) &&
                                   is_cut_evenly(composition.inputs[key], mesh, kHeads, num_keys));
}

// Returns the rows for the outputs: the result, its log-sum-exp, random states, and last any debug mask.
Rows attention(const OpCall& call) {
  RowList rows(call);
  for (const int64_t dim : {int64_t{0}, kHeads}) {
    std::vector<Placement> outputs(call.outputs.size(), replicate());
    outputs.at(0) = any_shard(dim);
    outputs.at(1) = any_shard(dim);
    if (flag_or(call, "return_debug_mask", false)) {
      outputs.back() = any_shard(dim);
    }
    rows.add(outputs, attention_inputs(call, dim));
  }
  return rows.refusing_empty_shards(keeps_groups_of_heads);
}

// Returns the rows for the outputs: the gradients of query, key, value and, in some operators, of the bias.
Rows attention_backward(const OpCall& call) {
  RowList rows(call);
  const auto* bias = score_bias(call);
  for (const int64_t dim : {int64_t{0}, kHeads}) {
    std::vector<Placement> outputs(call.outputs.size(), any_shard(dim));
    if (outputs.size() > 3 && bias != nullptr) {
      const auto of_bias = broadcast_shard(*bias, dim, kNumDims);
      outputs[3] = of_bias.is_shard() ? of_bias : partial();
    }
    rows.add(outputs, attention_inputs(call, dim));
  }
  return rows.refusing_empty_shards(keeps_groups_of_heads);
}

}  // namespace

void add(RuleTable& table) {
  // Overloads for quantized tensors have no rule: their scales have dims of batches and heads, too.
  table.add_overloads(
      {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
       "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"},
      attention);
  table.add_operators({"aten::_scaled_dot_product_flash_attention_backward",
                       "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                       "aten::_scaled_dot_product_efficient_attention_backward",
                       "aten::_scaled_dot_product_cudnn_attention_backward"},
                      attention_backward);
}

}  // namespace funcol::attention_rules
