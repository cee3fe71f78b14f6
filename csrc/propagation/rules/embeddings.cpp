// Embeddings: the rows of a table that indices pick, and the gradient of the table.
#include "layout/shards.h"
#include "propagation/rules/row_list.h"
#include "propagation/rules/rule_table.h"

namespace funcol::embedding_rules {
namespace {

// Returns true if every rank has a row of the table: masked indices pick row 0.
bool all_have_rows(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const size_t table = call.arg("weight").tensor();
  return leaves_none_empty(composition.inputs[table], mesh, 0, call.tensors[table].shape.at(0));
}

// Returns the rows of embedding(weight[v, n], indices[*]) -> [*, n].
Rows embedding(const OpCall& call) {
  RowList rows(call);
  const int64_t num_dims = call.tensor("indices").num_dims();
  rows.add(any_shard(num_dims), {{"weight", any_shard(1)}});
  // Only with a plain Shard does a rank hold rows with consecutive numbers.
  rows.add(masked(0), {{"weight", Placement::shard(0)}, {"indices", masked(0)}});
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    rows.add_same_placement(any_shard(dim), {"indices"});
  }
  rows.add_partials(kAllPartialOps, {"weight"});
  auto result = rows.allowing_empty_shards(all_have_rows);
  result.masks = {{call.tensor("weight").shape, 0}};
  return result;
}

// Returns the rows of embedding_dense_backward(grad_output, indices, num_weights, ...). The gradient of a row
// is the sum over the indices that picked it; scale_grad_by_freq divides it by their number over all ranks.
Rows embedding_backward(const OpCall& call) {
  RowList rows(call);
  const int64_t last = call.tensor("grad_output").num_dims() - 1;
  rows.add(any_shard(1), {{"grad_output", any_shard(last)}});
  if (!flag_or(call, "scale_grad_by_freq", false)) {
    for (int64_t dim = 0; dim < call.tensor("indices").num_dims(); ++dim) {
      rows.add(partial(), {{"grad_output", any_shard(dim)}, {"indices", any_shard(dim)}});
    }
  }
  rows.add_arithmetic_partials(kLinearOps, {"grad_output"});
  return rows.allowing_empty_shards();
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::embedding"}, embedding);
  table.add_operators({"aten::embedding_dense_backward"}, embedding_backward);
}

}  // namespace funcol::embedding_rules
