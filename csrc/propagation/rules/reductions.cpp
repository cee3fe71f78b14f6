// Reductions along dims.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol::reduction_rules {
namespace {

// Returns true if the call names no dims, and its shapes do not determine if it then reduces all dims or
// none. On a rank without the only element, the result would have another shape.
bool is_unclear(const OpCall& call) {
  const auto& self = call.tensors.at(0);
  const auto& result = call.outputs.at(0);
  const std::string_view name = call.has_arg("dim") ? "dim" : "dims";
  return call.has_arg(name) && call.arg(name).is_list() && call.arg(name).list().empty() && result &&
         result->shape == self.shape &&
         std::ranges::all_of(self.shape, [](int64_t size) { return size == 1; });
}

// Returns the reduced dims. An empty list means all dims, unless the result has the shape of the input.
std::vector<int64_t> reduced_dims(const OpCall& call) {
  const auto& self = call.tensors.at(0);
  std::vector<int64_t> all(self.num_dims());
  std::iota(all.begin(), all.end(), 0);
  const std::string_view name = call.has_arg("dim") ? "dim" : "dims";
  if (!call.has_arg(name) || call.arg(name).is_none()) {
    return all;
  }
  auto dims = dims_argument(call, name);
  const auto& result = call.outputs.at(0);
  if (dims.empty() && !(result && result->shape == self.shape)) {
    return all;
  }
  return dims;
}

// Adds a row for each dim that is not reduced.
void add_kept_dims(const OpCall& call, RowList& rows) {
  if (is_unclear(call)) {
    return;
  }
  const auto map = flag_or(call, "keepdim", false) ? with_unsharded_dims : without_dims;
  add_mapped_dims(rows, map(num_dims(call), reduced_dims(call)));
}

using Check = bool (*)(const Layout&, const Mesh&, int64_t dim, int64_t size);

// Returns true if the shards of each reduced dim pass the check.
template <Check check>
bool of_reduced_dims(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  return std::ranges::all_of(reduced_dims(call), [&](int64_t dim) {
    return composition.inputs[0].axes_of(dim).empty() ||
           check(composition.inputs[0], mesh, dim, call.tensors[0].shape[dim]);
  });
}

// Returns rows that shard only dims that are not reduced.
Rows over_unsharded_dims(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  return rows.allowing_empty_shards();
}

// Returns a rule in which `op` reduces the results of shards of a reduced dim. The reductions `commuting`
// commute with the operator.
Rule reduction(PartialOp op, std::vector<PartialOp> commuting, LegalityCheck is_legal = nullptr) {
  return [op, commuting = std::move(commuting), is_legal = std::move(is_legal)](const OpCall& call) {
    RowList rows(call);
    add_kept_dims(call, rows);
    for (const int64_t dim : reduced_dims(call)) {
      if (dim < num_dims(call)) {
        rows.add_arithmetic(partial(op), {any_shard(dim)});
      }
    }
    rows.add_arithmetic_partials(commuting);
    return rows.allowing_empty_shards(is_legal);
  };
}

// Returns the rule of sums of mapped elements: nansum, sums of powers.
Rule sum_of_mapped() { return reduction(PartialOp::kSum, {}); }

// Returns the rule of the mean: the average of the ranks' means if all ranks have equally many elements.
Rule mean() {
  return reduction(PartialOp::kAvg, {PartialOp::kAvg, PartialOp::kSum}, of_reduced_dims<is_cut_evenly>);
}

// Returns the rule of an extreme, which an empty shard does not have.
Rule extreme(PartialOp op) { return reduction(op, {op}, of_reduced_dims<leaves_none_empty>); }

// Returns the order of linalg_vector_norm(self, ord) or norm(self, p), which is 2 by default.
NormOrder norm_order(const OpCall& call) {
  const std::string_view name = call.has_arg("ord") ? "ord" : "p";
  return {real_number(call, name).value_or(2), !std::holds_alternative<double>(call.arg(name).value)};
}

// Returns the rows of a norm: the norm of shards' norms. Elements have signs: no reduction commutes with it.
Rows norm(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  const auto order = norm_order(call);
  const auto of_shards = std::isinf(order.value)
                             ? partial(order.value > 0 ? PartialOp::kMax : PartialOp::kMin)
                         : order.value == 0 ? partial()
                                            : Placement::norm_partial(order);
  for (const int64_t dim : reduced_dims(call)) {
    if (!std::isnan(order.value) && dim < num_dims(call)) {
      rows.add(of_shards, {any_shard(dim)});
    }
  }
  // An empty shard has no norm of these orders.
  const bool needs_elements = order.value < 0 || std::isinf(order.value);
  return rows.allowing_empty_shards(needs_elements ? of_reduced_dims<leaves_none_empty> : nullptr);
}

// Returns the rows of histc(self, bins, min, max). Shards' counts add up, unless the elements set the bounds.
Rows histogram(const OpCall& call) {
  RowList rows(call);
  const auto min = real_number(call, "min");
  const auto max = real_number(call, "max");
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    if (min && max && *min < *max) {
      rows.add(partial(), {any_shard(dim)});
    }
  }
  return rows.allowing_empty_shards();
}

Rows on_full_tensors(const OpCall&) { return {}; }

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::sum", "prims::sum"},
                      reduction(PartialOp::kSum, {PartialOp::kSum, PartialOp::kAvg}));
  table.add_operators({"aten::nansum", "aten::linalg__powsum"}, sum_of_mapped());
  table.add_overloads({"aten::_foreach_powsum.Scalar"}, sum_of_mapped());
  table.add_operators({"aten::prod", "prims::prod"}, reduction(PartialOp::kProduct, {PartialOp::kProduct}));
  table.add_operators({"aten::mean"}, mean());
  table.add_operators({"aten::amax", "prims::amax"}, extreme(PartialOp::kMax));
  table.add_operators({"aten::amin", "prims::amin"}, extreme(PartialOp::kMin));
  table.add_overloads({"aten::max", "aten::max.unary_out", "aten::_foreach_max"}, extreme(PartialOp::kMax));
  table.add_overloads({"aten::min", "aten::min.unary_out"}, extreme(PartialOp::kMin));
  table.add_overloads(
      {"aten::max.dim", "aten::max.dim_max", "aten::min.dim", "aten::min.dim_min", "aten::median.dim",
       "aten::median.dim_values", "aten::nanmedian.dim", "aten::nanmedian.dim_values"},
      over_unsharded_dims);
  table.add_operators(
      {"aten::all", "aten::any", "aten::argmax", "aten::argmin", "aten::kthvalue", "aten::logsumexp",
       "aten::mode", "aten::std", "aten::var", "aten::std_mean", "aten::var_mean", "prims::var"},
      over_unsharded_dims);
  table.add_operators({"aten::linalg_vector_norm", "aten::norm"}, norm);
  table.add_operators({"aten::histc"}, histogram);
  table.add_overloads({"aten::median", "aten::median.out", "aten::nanmedian", "aten::nanmedian.out"},
                      on_full_tensors);
  table.add_operators({"aten::_local_scalar_dense"}, on_full_tensors);
}

}  // namespace funcol::reduction_rules
