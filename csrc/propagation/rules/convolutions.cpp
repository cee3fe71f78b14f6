// Convolutions: the input is [batch, channels, *places].
#include "propagation/rules/row_list.h"
#include "propagation/rules/rule_table.h"

namespace funcol::convolution_rules {
namespace {

// Returns true if windows lie side by side on the last dim, so that no window reaches from one rank to the
// next.
bool has_disjoint_windows(const OpCall& call) {
  return !call.arg("transposed").boolean() && call.arg("padding").integers().back() == 0 &&
         call.arg("dilation").integers().back() == 1 &&
         call.arg("stride").integers().back() == call.tensor("weight").shape.back();
}

// Returns true if every rank has complete windows.
bool has_complete_windows(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const auto& shape = call.tensor("input").shape;
  const auto& layout = composition.inputs[call.arg("input").tensor()];
  const int64_t last = std::ssize(shape) - 1;
  const int64_t stride = call.arg("stride").integers().back();
  return layout.axes_of(last).empty() ||
         (shape[last] % stride == 0 && is_cut_evenly(layout, mesh, last, shape[last] / stride));
}

// Returns the batch dim, and the last dim if windows do not overlap there.
std::vector<int64_t> dims_to_shard(const OpCall& call) {
  const int64_t last = call.tensor("input").num_dims() - 1;
  return has_disjoint_windows(call) ? std::vector<int64_t>{0, last} : std::vector<int64_t>{0};
}

Rows convolution(const OpCall& call) {
  RowList rows(call);
  for (const int64_t dim : dims_to_shard(call)) {
    rows.add_same_placement(any_shard(dim), {"input"});
  }
  for (const auto op : kLinearOps) {
    for (const auto* linear_in : {"input", "weight"}) {
      rows.add_arithmetic(partial(op), {{linear_in, partial(op)}, {"bias", partial(op)}});
    }
  }
  return rows.allowing_empty_shards(has_complete_windows);
}

Rows convolution_backward(const OpCall& call) {
  RowList rows(call);
  for (const int64_t dim : dims_to_shard(call)) {
    std::vector<Placement> outputs(call.outputs.size(), partial());
    outputs.at(0) = any_shard(dim);
    rows.add(outputs, {{"grad_output", any_shard(dim)}, {"input", any_shard(dim)}});
  }
  rows.add_arithmetic_partials(kLinearOps, {"grad_output"});
  return rows.allowing_empty_shards(has_complete_windows);
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::convolution"}, convolution);
  table.add_operators({"aten::convolution_backward"}, convolution_backward);
}

}  // namespace funcol::convolution_rules
