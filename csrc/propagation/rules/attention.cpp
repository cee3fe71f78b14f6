// Fused attention: query, key and value are [batch, heads, length, features], and each head of each sequence
// is by itself.
#include <algorithm>

#include "propagation/rules/families.h"
#include "propagation/rules/rows.h"

namespace funcol {
namespace {

constexpr int64_t kHeads = 1;
constexpr int64_t kNumDims = 4;

// What is added to the scores of all heads of all sequences may be the same for them: broadcast.
const TensorMeta* score_bias(const OpCall& call) {
  for (const auto* name : {"attn_bias", "attn_mask"}) {
    if (has_tensor(call, name)) {
      return &call.tensor(name);
    }
  }
  return nullptr;
}

// Where it stands when dim `dim` is cut; whole where it is broadcast.
Placement bias_placement(const TensorMeta& bias, int64_t dim) {
  const int64_t own = dim - (kNumDims - bias.num_dims());
  return own >= 0 && bias.shape[own] != 1 ? any_shard(own) : replicate();
}

std::vector<Placement> attention_inputs(const OpCall& call, int64_t dim) {
  const auto shard = any_shard(dim);
  const auto* bias = score_bias(call);
  const auto of_bias = bias != nullptr ? bias_placement(*bias, dim) : replicate();
  return inputs_by_name(call, {{"grad_out", shard},
                               {"grad_out_", shard},
                               {"query", shard},
                               {"key", shard},
                               {"value", shard},
                               {"out", shard},
                               {"logsumexp", shard},
                               {"attn_bias", of_bias},
                               {"attn_mask", of_bias}});
}

// Queries share keys in groups of heads: evenly cut, every rank has the keys of its queries.
bool keeps_groups_of_heads(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const auto names = tensor_names(call);
  const auto number_of = [&](std::string_view name) {
    return std::ranges::find(names, name) - names.begin();
  };
  const auto query = number_of("query");
  const auto key = number_of("key");
  const int64_t num_heads = call.tensors[query].shape.at(kHeads);
  const int64_t num_keys = call.tensors[key].shape.at(kHeads);
  return num_heads == num_keys || (is_cut_evenly(composition.inputs[query], mesh, kHeads, num_heads) &&
                                   is_cut_evenly(composition.inputs[key], mesh, kHeads, num_keys));
}

// The output, its log-sum-exp, then states of random numbers, and last the mask for debugging if it is
// returned.
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
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = keeps_groups_of_heads};
}

// The gradients of query, key and value, and for some that of the bias.
Rows attention_backward(const OpCall& call) {
  RowList rows(call);
  const auto* bias = score_bias(call);
  for (const int64_t dim : {int64_t{0}, kHeads}) {
    std::vector<Placement> outputs(call.outputs.size(), any_shard(dim));
    if (outputs.size() > 3 && bias != nullptr) {
      const auto of_bias = bias_placement(*bias, dim);
      outputs[3] = of_bias.is_shard() ? of_bias : partial();
    }
    rows.add(outputs, attention_inputs(call, dim));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = keeps_groups_of_heads};
}

}  // namespace

void add_attention_rules(RuleTable& table) {
  // Not for the overload of quantized tensors: its scales are of batches and heads, too.
  table.add_overloads(
      {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
       "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"},
      attention);
  table.add_all_overloads({"aten::_scaled_dot_product_flash_attention_backward",
                           "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                           "aten::_scaled_dot_product_efficient_attention_backward",
                           "aten::_scaled_dot_product_cudnn_attention_backward"},
                          attention_backward);
}

}  // namespace funcol
