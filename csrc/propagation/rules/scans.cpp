// Operators that need one dim whole, and do the same along it wherever the others are cut.
#include "propagation/rules/dim_map.h"
#include "propagation/rules/families.h"

namespace funcol {
namespace {

int64_t num_dims(const OpCall& call) { return call.tensors.at(0).num_dims(); }

void add_other_dims(const OpCall& call, RowList& rows) {
  if (num_dims(call) > 0) {
    add_dims_alike(call, rows, whole_dims(num_dims(call), {dim_argument(call, "dim", num_dims(call))}));
  }
}

Rows along_a_dim(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

Rows cumulative_sum(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows);
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), {partial(op)});
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// Gradients of softmax: linear in what comes back.
Rows softmax_backward(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows);
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"grad_output", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// Fourier transforms are linear, and go along the dims that they name.
Rows fourier(const OpCall& call) {
  RowList rows(call);
  add_dims_alike(call, rows, whole_dims(num_dims(call), dims_argument(call, "dim")));
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), {partial(op)});
  }
  return {.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

}  // namespace

void add_scan_rules(RuleTable& table) {
  table.add_all_overloads(
      {"aten::_log_softmax", "aten::_safe_softmax", "aten::_softmax", "aten::cummax", "aten::cummin",
       "aten::cumprod", "aten::linalg_cross", "aten::logcumsumexp", "aten::sort", "aten::topk"},
      along_a_dim);
  table.add_all_overloads({"aten::cumsum"}, cumulative_sum);
  table.add_all_overloads({"aten::_log_softmax_backward_data", "aten::_softmax_backward_data"},
                          softmax_backward);
  table.add_all_overloads({"aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c"}, fourier);
}

}  // namespace funcol
