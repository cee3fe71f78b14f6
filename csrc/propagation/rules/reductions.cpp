// Operators that make one element of all along some dims.
#include <algorithm>
#include <cmath>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/families.h"

namespace funcol {
namespace {

// The dims that are reduced; no dims named are all, unless the result shows that none were.
std::vector<int64_t> reduced_dims(const OpCall& call) {
  const auto& self = call.tensors.at(0);
  std::vector<int64_t> all;
  all.reserve(self.num_dims());
  for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
    all.push_back(dim);
  }
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

// Dims that are not reduced stay cut.
void add_kept_dims(const OpCall& call, RowList& rows) {
  const auto reduced = reduced_dims(call);
  const int64_t num_dims = call.tensors[0].num_dims();
  add_mapped_dims(rows, flag_or(call, "keepdim", false) ? whole_dims(num_dims, reduced)
                                                        : without_dims(num_dims, reduced));
}

void add_reduced_dims(const OpCall& call, RowList& rows, PartialOp op) {
  for (const int64_t dim : reduced_dims(call)) {
    if (dim < call.tensors[0].num_dims()) {
      rows.add_arithmetic(partial(op), {any_shard(dim)});
    }
  }
}

using Check = bool (*)(const Layout&, const Mesh&, int64_t dim, int64_t size);

// Whether what is held of each reduced dim passes.
template <Check check>
bool of_reduced_dims(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  return std::ranges::all_of(reduced_dims(call), [&](int64_t dim) {
    return composition.inputs[0].axes_of(dim).empty() ||
           check(composition.inputs[0], mesh, dim, call.tensors[0].shape[dim]);
  });
}

// Only dims that stay may be cut.
Rows of_whole_dims(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// Nothing along the dim is 0.
Rows sum(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  add_reduced_dims(call, rows, PartialOp::kSum);
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), {partial(op)});
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// Adds what is made of elements one by one: neither NaNs that are passed over nor powers go on pending.
Rows sum_of_mapped(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  add_reduced_dims(call, rows, PartialOp::kSum);
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

Rows product(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  add_reduced_dims(call, rows, PartialOp::kProduct);
  rows.add_arithmetic(partial(PartialOp::kProduct), {partial(PartialOp::kProduct)});
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// The mean of means is that of all where every rank has as many elements.
Rows mean(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  add_reduced_dims(call, rows, PartialOp::kAvg);
  for (const auto op : {PartialOp::kAvg, PartialOp::kSum}) {
    rows.add_arithmetic(partial(op), {partial(op)});
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = of_reduced_dims<is_cut_evenly>};
}

// There is no extreme of nothing.
Rule extreme(PartialOp op) {
  return [op](const OpCall& call) {
    RowList rows(call);
    add_kept_dims(call, rows);
    add_reduced_dims(call, rows, op);
    rows.add_arithmetic(partial(op), {partial(op)});
    return Rows{
        .rows = rows.take(), .allows_empty_shards = true, .is_legal = of_reduced_dims<leaves_none_empty>};
  };
}

// linalg_vector_norm(self, ord), norm(self, p): 2 unless it is given.
NormOrder norm_order(const OpCall& call) {
  const std::string_view name = call.has_arg("ord") ? "ord" : "p";
  return {real_number(call, name).value_or(2), !std::holds_alternative<double>(call.arg(name).value)};
}

// Norms of parts make up that of the whole; but neither sums nor extremes of what has signs have the norm of
// theirs, so nothing goes on pending.
Rows norm(const OpCall& call) {
  RowList rows(call);
  add_kept_dims(call, rows);
  const auto order = norm_order(call);
  const bool has_parts = !std::isnan(order.value);
  const auto pending = std::isinf(order.value) ? partial(order.value > 0 ? PartialOp::kMax : PartialOp::kMin)
                       : order.value == 0      ? partial()
                                               : Placement::norm_partial(order);
  for (const int64_t dim : reduced_dims(call)) {
    if (has_parts && dim < call.tensors[0].num_dims()) {
      rows.add(pending, {any_shard(dim)});
    }
  }
  // Of nothing there is none of these.
  const bool needs_elements = order.value < 0 || std::isinf(order.value);
  return {.rows = rows.take(),
          .allows_empty_shards = true,
          .is_legal = needs_elements ? of_reduced_dims<leaves_none_empty> : nullptr};
}

// histc(self, bins, min, max): bins are known beforehand if their range is; equal bounds mean that of the
// data.
Rows histogram(const OpCall& call) {
  RowList rows(call);
  const auto min = real_number(call, "min");
  const auto max = real_number(call, "max");
  for (int64_t dim = 0; dim < call.tensors.at(0).num_dims(); ++dim) {
    if (min && max && *min < *max) {
      rows.add(partial(), {any_shard(dim)});
    }
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

Rows on_whole_tensors(const OpCall&) { return {}; }

}  // namespace

void add_reduction_rules(RuleTable& table) {
  table.add_all_overloads({"aten::sum", "prims::sum"}, sum);
  table.add_all_overloads({"aten::nansum", "aten::linalg__powsum"}, sum_of_mapped);
  table.add_overloads({"aten::_foreach_powsum.Scalar"}, sum_of_mapped);
  table.add_all_overloads({"aten::prod", "prims::prod"}, product);
  table.add_all_overloads({"aten::mean"}, mean);
  table.add_all_overloads({"aten::amax", "prims::amax"}, extreme(PartialOp::kMax));
  table.add_all_overloads({"aten::amin", "prims::amin"}, extreme(PartialOp::kMin));
  table.add_overloads({"aten::max", "aten::max.unary_out", "aten::_foreach_max"}, extreme(PartialOp::kMax));
  table.add_overloads({"aten::min", "aten::min.unary_out"}, extreme(PartialOp::kMin));
  table.add_overloads(
      {"aten::max.dim", "aten::max.dim_max", "aten::min.dim", "aten::min.dim_min", "aten::median.dim",
       "aten::median.dim_values", "aten::nanmedian.dim", "aten::nanmedian.dim_values"},
      of_whole_dims);
  table.add_all_overloads(
      {"aten::all", "aten::any", "aten::argmax", "aten::argmin", "aten::kthvalue", "aten::logsumexp",
       "aten::mode", "aten::std", "aten::var", "aten::std_mean", "aten::var_mean", "prims::var"},
      of_whole_dims);
  table.add_all_overloads({"aten::linalg_vector_norm", "aten::norm"}, norm);
  table.add_all_overloads({"aten::histc"}, histogram);
  table.add_overloads({"aten::median", "aten::median.out", "aten::nanmedian", "aten::nanmedian.out"},
                      on_whole_tensors);
  table.add_all_overloads({"aten::_local_scalar_dense"}, on_whole_tensors);
}

}  // namespace funcol
