// Operators that put tensors together, or one into another.
#include <algorithm>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/families.h"

namespace funcol {
namespace {

// cat() passes over vectors of no elements, whatever dims the others have.
bool is_passed_over(const TensorMeta& meta) { return meta.shape == std::vector<int64_t>{0}; }

Rows cat(const OpCall& call) {
  RowList rows(call);
  const auto first = std::ranges::find_if_not(call.tensors, is_passed_over);
  const int64_t num_dims = first == call.tensors.end() ? 1 : first->num_dims();
  const auto add = [&](const Placement& placement) {
    std::vector<Placement> inputs;
    inputs.reserve(call.tensors.size());
    for (const auto& meta : call.tensors) {
      inputs.push_back(is_passed_over(meta) && num_dims != 1 ? replicate() : placement);
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
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

Rows stack(const OpCall& call) {
  RowList rows(call);
  const int64_t num_dims = call.tensors.at(0).num_dims();
  const int64_t inserted = dim_argument(call, "dim", num_dims + 1);
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    rows.add(any_shard(dim < inserted ? dim : dim + 1),
             std::vector<Placement>(call.tensors.size(), any_shard(dim)));
  }
  for (const auto op : kAllPartialOps) {
    rows.add_alike(partial(op));
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

using MakeDimMap = DimMap (*)(const OpCall&);

// A source put in place of elements of self, whose dims go where the map says in the source.
Rule put_into_self(MakeDimMap map_to_source) {
  return [map_to_source](const OpCall& call) {
    RowList rows(call);
    const auto map = map_to_source(call);
    for (size_t dim = 0; dim < map.size(); ++dim) {
      const auto shard = any_shard(static_cast<int64_t>(dim));
      if (const auto& goes = map[dim]) {
        rows.add(shard, inputs_by_name(call, {{"self", shard}, {"src", any_shard(*goes)}}));
      }
    }
    for (const auto op : kAllPartialOps) {
      rows.add_alike(partial(op));
    }
    return Rows{.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
  };
}

int64_t num_dims(const OpCall& call) { return call.tensor("self").num_dims(); }

DimMap selected(const OpCall& call) {
  return without_dims(num_dims(call), {dim_argument(call, "dim", num_dims(call))});
}

DimMap sliced(const OpCall& call) {
  return whole_dims(num_dims(call), {dim_argument(call, "dim", num_dims(call))});
}

DimMap of_diagonal(const OpCall& call) {
  return without_dims(num_dims(call), {dim_argument(call, "dim1", num_dims(call)),
                                       dim_argument(call, "dim2", num_dims(call))});
}

// constant_pad_nd(self, pad, value): pad lists how much goes before and behind, from the last dim on.
Rows pad(const OpCall& call) {
  RowList rows(call);
  const auto amounts = call.arg("pad").integers();
  std::vector<int64_t> padded;
  for (size_t i = 0; i + 1 < amounts.size(); i += 2) {
    if (amounts[i] != 0 || amounts[i + 1] != 0) {
      padded.push_back(num_dims(call) - 1 - static_cast<int64_t>(i / 2));
    }
  }
  add_mapped_dims(rows, whole_dims(num_dims(call), padded));
  for (const auto op : kAllPartialOps) {
    const bool keeps_constants = op == PartialOp::kAvg || op == PartialOp::kMax || op == PartialOp::kMin;
    const bool keeps_0 = op == PartialOp::kSum || op == PartialOp::kProduct;
    if (padded.empty() || keeps_constants || (keeps_0 && real_number(call, "value") == 0.0)) {
      rows.add_alike(partial(op));
    }
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// Whether tensors agree is told by every rank for what it holds.
Rows equal(const OpCall& call) {
  RowList rows(call);
  if (call.tensors.at(0).shape == call.tensors.at(1).shape) {
    add_dims_alike(call, rows, same_dims(call.tensors[0].num_dims()));
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

}  // namespace

void add_joining_rules(RuleTable& table) {
  table.add_all_overloads({"aten::cat"}, cat);
  table.add_all_overloads({"aten::stack"}, stack);
  table.add_all_overloads({"aten::select_scatter"}, put_into_self(selected));
  table.add_all_overloads({"aten::slice_scatter"}, put_into_self(sliced));
  table.add_all_overloads({"aten::diagonal_scatter"}, put_into_self(of_diagonal));
  table.add_all_overloads({"aten::constant_pad_nd"}, pad);
  table.add_all_overloads({"aten::equal", "aten::is_same_size"}, equal);
}

}  // namespace funcol
