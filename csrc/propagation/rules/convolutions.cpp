// Convolutions: input [batch, channels, *places], weight whole.
#include <algorithm>

#include "propagation/rules/families.h"
#include "propagation/rules/rows.h"

namespace funcol {
namespace {

// Whether windows on the last dim stand side by side, so that none reaches over from one rank to the next.
bool has_disjoint_windows(const OpCall& call) {
  return !call.arg("transposed").boolean() && call.arg("padding").integers().back() == 0 &&
         call.arg("dilation").integers().back() == 1 &&
         call.arg("stride").integers().back() == call.tensor("weight").shape.back();
}

// Whether every rank has whole windows.
bool has_whole_windows(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const auto names = tensor_names(call);
  const auto input = std::ranges::find(names, "input") - names.begin();
  const int64_t last = call.tensors[input].num_dims() - 1;
  const auto& layout = composition.inputs[input];
  const int64_t size = call.tensors[input].shape[last];
  const int64_t stride = call.arg("stride").integers().back();
  return layout.axes_of(last).empty() ||
         (size % stride == 0 && is_cut_evenly(layout, mesh, last, size / stride));
}

// Images may be cut, and the last dim of those whose windows do not overlap.
std::vector<int64_t> dims_to_cut(const OpCall& call) {
  const int64_t last = call.tensor("input").num_dims() - 1;
  return has_disjoint_windows(call) ? std::vector<int64_t>{0, last} : std::vector<int64_t>{0};
}

Rows convolution(const OpCall& call) {
  RowList rows(call);
  for (const int64_t dim : dims_to_cut(call)) {
    rows.add(any_shard(dim), inputs_by_name(call, {{"input", any_shard(dim)}}));
  }
  for (const auto op : kLinearOps) {
    for (const auto* pending : {"input", "weight"}) {
      rows.add_arithmetic(partial(op), inputs_by_name(call, {{pending, partial(op)}, {"bias", partial(op)}}));
    }
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = has_whole_windows};
}

Rows convolution_backward(const OpCall& call) {
  RowList rows(call);
  for (const int64_t dim : dims_to_cut(call)) {
    std::vector<Placement> outputs(call.outputs.size(), partial());
    outputs.at(0) = any_shard(dim);
    rows.add(outputs, inputs_by_name(call, {{"grad_output", any_shard(dim)}, {"input", any_shard(dim)}}));
  }
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"grad_output", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = has_whole_windows};
}

}  // namespace

void add_convolution_rules(RuleTable& table) {
  table.add_all_overloads({"aten::convolution"}, convolution);
  table.add_all_overloads({"aten::convolution_backward"}, convolution_backward);
}

}  // namespace funcol
