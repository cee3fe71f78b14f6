// Rows of a table picked by indices, and what their gradients make of the table's.
#include "layout/shards.h"
#include "propagation/rules/families.h"
#include "propagation/rules/rows.h"

namespace funcol {
namespace {

// There is no row 0 for indices that are masked where a rank has no rows.
bool all_have_rows(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const size_t table = call.arg("weight").tensor();
  return leaves_none_empty(composition.inputs[table], mesh, 0, call.tensors[table].shape.at(0));
}

// embedding(weight[v, n], indices[*]) -> [*, n]
Rows embedding(const OpCall& call) {
  RowList rows(call);
  const int64_t num_dims = call.tensor("indices").num_dims();
  rows.add(any_shard(num_dims), inputs_by_name(call, {{"weight", any_shard(1)}}));
  // Offsets into the table are those of the plain Shard.
  rows.add(masked(0), inputs_by_name(call, {{"weight", Placement::shard(0)}, {"indices", masked(0)}}));
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    rows.add(any_shard(dim), inputs_by_name(call, {{"indices", any_shard(dim)}}));
  }
  for (const auto op : kAllPartialOps) {
    rows.add(partial(op), inputs_by_name(call, {{"weight", partial(op)}}));
  }
  return {.rows = rows.take(),
          .allows_empty_shards = true,
          .is_legal = all_have_rows,
          .masks = {{call.tensor("weight").shape, 0}}};
}

// embedding_dense_backward(grad_output, indices, num_weights, ...): rows of the weight get what their indices
// got, which adds up over these, unless it is divided by how often each is there.
Rows embedding_backward(const OpCall& call) {
  RowList rows(call);
  const int64_t last = call.tensor("grad_output").num_dims() - 1;
  rows.add(any_shard(1), inputs_by_name(call, {{"grad_output", any_shard(last)}}));
  for (int64_t dim = 0; dim < call.tensor("indices").num_dims(); ++dim) {
    if (!flag_or(call, "scale_grad_by_freq", false)) {
      rows.add(partial(),
               inputs_by_name(call, {{"grad_output", any_shard(dim)}, {"indices", any_shard(dim)}}));
    }
  }
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"grad_output", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

}  // namespace

void add_embedding_rules(RuleTable& table) {
  table.add_all_overloads({"aten::embedding"}, embedding);
  table.add_all_overloads({"aten::embedding_dense_backward"}, embedding_backward);
}

}  // namespace funcol
