// Decompositions and solvers of matrices: the last two dims are a matrix, the dims in front a batch.
#include <algorithm>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol::linear_algebra_rules {
namespace {

// The arguments of an operator on batches of matrices.
struct Solver {
  std::string_view vectors;         // the argument that is a batch of vectors (pivots, factors)
  std::string_view linear_in = {};  // the argument in which the first output is linear
};

std::vector<int64_t> batch_of(const TensorMeta& meta, int64_t num_dims) {
  return {meta.shape.begin(), meta.shape.begin() + num_dims};
}

// Returns true if all tensors have the same batch dims, so that none is broadcast.
bool have_one_batch(const OpCall& call, std::string_view vectors) {
  const auto names = tensor_names(call);
  const auto& first = call.tensors.at(0);
  const int64_t num_batch_dims = first.num_dims() - 2;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& meta = call.tensors[i];
    if (meta.num_dims() != first.num_dims() - (names[i] == vectors ? 1 : 0) ||
        batch_of(meta, num_batch_dims) != batch_of(first, num_batch_dims)) {
      return false;
    }
  }
  return true;
}

// Returns the placement of an output. One that was not requested has no elements and no batch.
Placement output_shard(const std::optional<TensorMeta>& meta, int64_t dim, int64_t size) {
  return meta && dim < meta->num_dims() && meta->shape[dim] == size ? any_shard(dim) : replicate();
}

void add_solver_rows(const OpCall& call, RowList& rows, const Solver& solver) {
  const auto& first = call.tensors.at(0);
  if (first.num_dims() > 2 && have_one_batch(call, solver.vectors)) {
    for (int64_t dim = 0; dim < first.num_dims() - 2; ++dim) {
      std::vector<Placement> outputs;
      outputs.reserve(call.outputs.size());
      for (const auto& meta : call.outputs) {
        outputs.push_back(output_shard(meta, dim, first.shape[dim]));
      }
      rows.add(outputs, std::vector<Placement>(call.tensors.size(), any_shard(dim)));
    }
  }
  if (!solver.linear_in.empty()) {
    for (const auto op : kLinearOps) {
      std::vector<Placement> outputs(call.outputs.size(), replicate());
      outputs.at(0) = partial(op);
      rows.add(outputs, {{solver.linear_in, partial(op)}});
    }
  }
}

Rows solved(const OpCall& call, const Solver& solver) {
  RowList rows(call);
  add_solver_rows(call, rows, solver);
  return rows.allowing_empty_shards();
}

Rule batched(const Solver& solver = {}) {
  return [solver](const OpCall& call) { return solved(call, solver); };
}

// Returns the rows of linalg_solve(A, B). B is a batch of vectors if it has A's shape without the last dim.
Rows solve(const OpCall& call) {
  const auto& a = call.tensor("A");
  const auto& b = call.tensor("B");
  const bool has_vectors = b.num_dims() == a.num_dims() - 1 && b.shape == batch_of(a, a.num_dims() - 1);
  return solved(call, {.vectors = has_vectors ? "B" : "", .linear_in = "B"});
}

// Returns the rows of linalg_solve_triangular(A, B), which broadcasts batches. More rows shard batch dims of
// B that A lacks or has in size 1.
Rows solve_triangular(const OpCall& call) {
  RowList rows(call);
  add_solver_rows(call, rows, {.vectors = {}, .linear_in = "B"});
  const auto& a = call.tensor("self");
  const auto& b = call.tensor("B");
  const int64_t more_dims = b.num_dims() - a.num_dims();
  for (int64_t dim = 0; more_dims >= 0 && dim < b.num_dims() - 2; ++dim) {
    const int64_t own = dim - more_dims;
    if (own < 0 || (a.shape[own] == 1 && b.shape[dim] != 1)) {
      rows.add_same_placement(any_shard(dim), {"B"});
    }
  }
  return rows.allowing_empty_shards();
}

// Returns the rows of linalg_pinv(self, atol, rtol), none if each matrix has a tolerance of its own.
Rows pseudo_inverse(const OpCall& call) {
  RowList rows(call);
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    if (call.tensors[i].num_dims() > 0) {
      return {};
    }
  }
  for (int64_t dim = 0; dim < call.tensor("self").num_dims() - 2; ++dim) {
    rows.add_same_placement(any_shard(dim), {"self"});
  }
  return rows.allowing_empty_shards();
}

// Returns rows in which every rank checks its shard.
Rows checked(const OpCall& call) {
  RowList rows(call);
  add_mapped_dims(rows, same_dims(num_dims(call)));
  return rows.allowing_empty_shards();
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators(
      {"aten::_linalg_det", "aten::_linalg_eigh", "aten::_linalg_slogdet", "aten::_linalg_svd",
       "aten::cholesky", "aten::cholesky_inverse", "aten::geqrf", "aten::linalg_cholesky_ex",
       "aten::linalg_eig", "aten::linalg_inv_ex", "aten::linalg_ldl_factor_ex", "aten::linalg_lu",
       "aten::linalg_lu_factor_ex", "aten::linalg_matrix_exp", "aten::linalg_qr"},
      batched());
  table.add_operators({"aten::linalg_householder_product"}, batched({.vectors = "tau"}));
  table.add_operators({"aten::lu_unpack"}, batched({.vectors = "LU_pivots"}));
  table.add_operators({"aten::ormqr"}, batched({.vectors = "input2", .linear_in = "input3"}));
  table.add_operators({"aten::linalg_ldl_solve", "aten::linalg_lu_solve"},
                      batched({.vectors = "pivots", .linear_in = "B"}));
  table.add_operators({"aten::cholesky_solve", "aten::triangular_solve"},
                      batched({.vectors = {}, .linear_in = "self"}));
  table.add_operators({"aten::linalg_solve_triangular"}, solve_triangular);
  table.add_operators({"aten::_linalg_solve_ex"}, solve);
  table.add_operators({"aten::linalg_pinv"}, pseudo_inverse);
  table.add_operators({"aten::_linalg_check_errors"}, checked);
}

}  // namespace funcol::linear_algebra_rules
