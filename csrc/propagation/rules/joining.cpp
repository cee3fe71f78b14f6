// Operators that join tensors, write a tensor into another, or compare two.
#include <algorithm>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol::joining_rules {
namespace {

// Returns true for vectors without elements, which cat() skips whatever dims the other tensors have.
bool is_skipped(const TensorMeta& meta) { return meta.shape == std::vector<int64_t>{0}; }

Rows cat(const OpCall& call) {
  RowList rows(call);
  const auto first = std::ranges::find_if_not(call.tensors, is_skipped);
  const int64_t num_dims = first == call.tensors.end() ? 1 : first->num_dims();
  const auto add = [&](const Placement& placement) {
    std::vector<Placement> inputs;
    inputs.reserve(call.tensors.size());
    for (const auto& meta : call.tensors) {
      inputs.push_back(is_skipped(meta) && num_dims != 1 ? replicate() : placement);
    }
    rows.add(placement, std::move(inputs));
  };
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    if (dim != dim_argument(call, "dim", num_dims)) {
      add(any_shard(dim));
    }
  }
  for (const auto op : kAllPartialOps) {
    add(partial(op));
  }
  return rows.allowing_empty_shards();
}

Rows stack(const OpCall& call) {
  RowList rows(call);
  add_mapped_dims(rows, with_inserted_dim(call));
  rows.add_partials(kAllPartialOps);
  return rows.allowing_empty_shards();
}

// Returns the rule of an operator that writes `src` into self. The map gives the dims of self in `src`.
Rule write_into_self(MakeDimMap map_to_source) {
  return [map_to_source](const OpCall& call) {
    RowList rows(call);
    const auto map = map_to_source(call);
    for (size_t dim = 0; dim < map.size(); ++dim) {
      const auto shard = any_shard(static_cast<int64_t>(dim));
      if (const auto& goes = map[dim]) {
        rows.add(shard, {{"self", shard}, {"src", any_shard(*goes)}});
      }
    }
    rows.add_partials(kAllPartialOps);
    return rows.allowing_empty_shards();
  };
}

// Returns the rows of constant_pad_nd(self, pad, value). `pad` lists sizes before and after dims, last first.
Rows pad(const OpCall& call) {
  RowList rows(call);
  const auto amounts = call.arg("pad").integers();
  std::vector<int64_t> padded;
  for (size_t i = 0; i + 1 < amounts.size(); i += 2) {
    if (amounts[i] != 0 || amounts[i + 1] != 0) {
      padded.push_back(num_dims(call) - 1 - static_cast<int64_t>(i / 2));
    }
  }
  add_mapped_dims(rows, with_unsharded_dims(num_dims(call), padded));
  for (const auto op : kAllPartialOps) {
    const bool keeps_constants = std::ranges::find(kOpsKeepingConstants, op) != kOpsKeepingConstants.end();
    const bool keeps_0 = op == PartialOp::kSum || op == PartialOp::kProduct;
    if (padded.empty() || keeps_constants || (keeps_0 && real_number(call, "value") == 0.0)) {
      rows.add_same_placement(partial(op));
    }
  }
  return rows.allowing_empty_shards();
}

// Returns rows in which every rank compares its shards.
Rows equal(const OpCall& call) {
  RowList rows(call);
  if (call.tensors.at(0).shape == call.tensors.at(1).shape) {
    add_common_dims(rows, same_dims(num_dims(call)));
  }
  return rows.allowing_empty_shards();
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::cat"}, cat);
  table.add_operators({"aten::stack"}, stack);
  table.add_operators({"aten::select_scatter"}, write_into_self(without_dim));
  table.add_operators({"aten::slice_scatter"}, write_into_self(with_unsharded_dim));
  table.add_operators({"aten::diagonal_scatter"}, write_into_self(without_diagonal_dims));
  table.add_operators({"aten::constant_pad_nd"}, pad);
  table.add_operators({"aten::equal", "aten::is_same_size"}, equal);
}

}  // namespace funcol::joining_rules
