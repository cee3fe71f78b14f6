// Operators along some dims, which they need in full. The indices of the other dims are independent.
#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol::scan_rules {
namespace {

// Returns a rule that shards `other_dims`. The result is linear in the argument `linear_in`, if there is one.
Rule along_dims(MakeDimMap other_dims, std::string_view linear_in = {}) {
  return [other_dims, linear_in](const OpCall& call) {
    RowList rows(call);
    add_common_dims(rows, other_dims(call));
    if (!linear_in.empty()) {
      rows.add_arithmetic_partials(kLinearOps, {linear_in});
    }
    return rows.allowing_empty_shards();
  };
}

DimMap not_transformed(const OpCall& call) {
  return with_unsharded_dims(num_dims(call), dims_argument(call, "dim"));
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators(
      {"aten::_log_softmax", "aten::_safe_softmax", "aten::_softmax", "aten::cummax", "aten::cummin",
       "aten::cumprod", "aten::linalg_cross", "aten::logcumsumexp", "aten::sort", "aten::topk"},
      along_dims(with_unsharded_dim));
  table.add_operators({"aten::cumsum"}, along_dims(with_unsharded_dim, "self"));
  table.add_operators({"aten::_log_softmax_backward_data", "aten::_softmax_backward_data"},
                      along_dims(with_unsharded_dim, "grad_output"));
  table.add_operators({"aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c"},
                      along_dims(not_transformed, "self"));
}

}  // namespace funcol::scan_rules
