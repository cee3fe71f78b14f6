// Operators that read or write the elements at given indices.
#include <algorithm>
#include <iterator>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/pointwise.h"
#include "propagation/rules/rule_table.h"

namespace funcol::indexing_rules {
namespace {

constexpr int64_t kUnknownSize = -1;

// The dims of an index.Tensor or index_put call. The elements that it reads or writes have the dims to which
// the indices are broadcast, in place of the indexed dims if these are neighbors, else in front.
struct Indexing {
  std::vector<size_t> indices;        // their numbers among the call's tensors
  std::vector<int64_t> indexed_dims;  // of self
  std::vector<int64_t> index_shape;   // to which the indices are broadcast
  int64_t first_index_dim = 0;        // in the result
  DimMap map;                         // of self's dims in the result
  bool has_masks = false;             // whether an index is a mask: its elements pair with no other index

  int64_t num_index_dims() const { return static_cast<int64_t>(index_shape.size()); }
  int64_t num_result_dims() const {
    return num_index_dims() + static_cast<int64_t>(map.size() - indexed_dims.size());
  }
};

bool is_mask(const TensorMeta& index) { return index.dtype == Dtype::kBool || index.dtype == Dtype::kUInt8; }

// Returns the shape to which indices are broadcast. The number of indices in a mask is not known in advance.
std::vector<int64_t> index_shape_of(const OpCall& call, const std::vector<size_t>& indices) {
  std::vector<size_t> tensors;
  std::ranges::copy_if(indices, std::back_inserter(tensors),
                       [&](size_t index) { return !is_mask(call.tensors[index]); });
  auto shape = broadcast_shape(call, tensors);
  if (shape.empty() && tensors.size() < indices.size()) {
    shape.push_back(kUnknownSize);
  }
  return shape;
}

// Returns the indexing of a call. Returns nullopt if there is no index, or if an index is a mask without
// dims. A mask indexes as many dims as it has.
std::optional<Indexing> indexing_of(const OpCall& call) {
  Indexing indexing;
  int64_t dim = 0;
  for (const auto& index : call.arg("indices").list()) {
    int64_t num_dims = 1;
    if (index.is_tensor()) {
      const auto& meta = call.tensors[index.tensor()];
      num_dims = is_mask(meta) ? meta.num_dims() : 1;
      if (num_dims == 0) {
        return std::nullopt;
      }
      indexing.has_masks = indexing.has_masks || is_mask(meta);
      indexing.indices.push_back(index.tensor());
      for (int64_t i = 0; i < num_dims; ++i) {
        indexing.indexed_dims.push_back(dim + i);
      }
    }
    dim += num_dims;
  }
  const auto& dims = indexing.indexed_dims;
  if (dims.empty()) {
    return std::nullopt;
  }
  indexing.index_shape = index_shape_of(call, indexing.indices);
  const bool are_neighbours = dims.back() - dims.front() + 1 == static_cast<int64_t>(dims.size());
  indexing.first_index_dim = are_neighbours ? dims.front() : 0;
  indexing.map = without_dims(call.tensor("self").num_dims(), dims);
  for (auto& goes : indexing.map) {
    if (goes && *goes >= indexing.first_index_dim) {
      *goes += indexing.num_index_dims();
    }
  }
  return indexing;
}

// Adds rows for the dims of self that are not indexed, and for the dims to which indices are broadcast.
void add_indexed_dims(const OpCall& call, RowList& rows, const Indexing& indexing) {
  add_mapped_dims(rows, indexing.map, "self");
  const auto& shape = indexing.index_shape;
  for (int64_t dim = 0; dim < indexing.num_index_dims(); ++dim) {
    if (shape[dim] != 1 && !indexing.has_masks) {
      std::vector<Placement> inputs(call.tensors.size(), replicate());
      for (const size_t index : indexing.indices) {
        inputs[index] = broadcast_shard(call.tensors[index], dim, indexing.num_index_dims(), shape[dim]);
      }
      rows.add(any_shard(indexing.first_index_dim + dim), std::move(inputs));
    }
  }
}

Rows index(const OpCall& call) {
  RowList rows(call);
  if (const auto indexing = indexing_of(call)) {
    add_indexed_dims(call, rows, *indexing);
  }
  rows.add_partials(kAllPartialOps, {"self"});
  return rows.allowing_empty_shards();
}

// Returns the rows of index_put(self, indices, values, accumulate): values broadcast to what index reads.
Rows index_put(const OpCall& call) {
  const auto indexing = indexing_of(call);
  if (!indexing) {
    return {};
  }
  RowList rows(call);
  const auto& values = call.tensor("values");
  for (size_t dim = 0; dim < indexing->map.size(); ++dim) {
    const auto& goes = indexing->map[dim];
    if (!goes) {
      continue;
    }
    const auto shard = any_shard(static_cast<int64_t>(dim));
    const auto of_values =
        broadcast_shard(values, *goes, indexing->num_result_dims(), call.tensor("self").shape[dim]);
    rows.add(shard, {{"self", shard}, {"values", of_values}});
  }
  // If several values go to one element, ranks may keep different ones, so values are partial only where they
  // are added. A mask names no element twice.
  if (flag_or(call, "accumulate", false)) {
    rows.add_arithmetic_partials(kLinearOps, {"self", "values"});
  } else if (indexing->has_masks && indexing->indices.size() == 1) {
    rows.add_arithmetic_partials(kAllPartialOps, {"self", "values"});
  }
  return rows.allowing_empty_shards();
}

// Returns the rows of index_select(self, dim, index).
Rows index_select(const OpCall& call) {
  RowList rows(call);
  const int64_t indexed = dim_argument(call, "dim");
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    if (dim != indexed) {
      rows.add_same_placement(any_shard(dim), {"self"});
    } else if (call.tensor("index").num_dims() == 1) {
      rows.add(any_shard(dim), {{"index", any_shard(0)}});
    }
  }
  rows.add_partials(kAllPartialOps, {"self"});
  return rows.allowing_empty_shards();
}

// Returns true if every rank has an element of the dim: masked indices pick element 0.
bool all_have_elements(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const auto& self = call.tensor("self");
  if (self.num_dims() == 0) {
    return true;
  }
  const int64_t dim = dim_argument(call, "dim");
  return leaves_none_empty(composition.inputs[call.arg("self").tensor()], mesh, dim, self.shape[dim]);
}

// Returns the rows of gather(self, dim, index). With dim 0, result[i][j] is self[index[i][j]][j]. The index
// may be shorter.
Rows gather(const OpCall& call) {
  RowList rows(call);
  const auto& self = call.tensor("self");
  const auto& index = call.tensor("index");
  if (self.num_dims() > 0 && index.num_dims() == self.num_dims()) {
    const int64_t gathered = dim_argument(call, "dim");
    if (index.shape[gathered] == 1) {
      rows.add(masked(0), {{"self", Placement::shard(gathered)}, {"index", masked(0)}});
    }
    rows.add_same_placement(any_shard(gathered), {"index"});
    for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
      if (dim != gathered && self.shape[dim] == index.shape[dim]) {
        rows.add_same_placement(any_shard(dim));
      }
    }
  }
  rows.add_partials(kAllPartialOps, {"self"});
  auto result = rows.allowing_empty_shards(all_have_elements);
  result.masks = {{self.shape, self.num_dims() > 0 ? dim_argument(call, "dim") : 0}};
  return result;
}

// Adds a row for each dim of self that is not indexed. The tensors of `arguments` have these dims.
void add_other_dims(const OpCall& call, RowList& rows, ArgumentNames arguments) {
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    if (dim != dim_argument(call, "dim")) {
      rows.add_same_placement(any_shard(dim), arguments);
    }
  }
}

Rows index_fill(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows, {"self"});
  if (has_tensor(call, "value")) {
    rows.add_partials(kAllPartialOps, {"self", "value"});
  }
  add_filled_partials(call, rows);
  return rows.allowing_empty_shards();
}

Rows index_written(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows, {"self", "source"});
  return rows.allowing_empty_shards();
}

Rows index_add(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows, {"self", "source"});
  rows.add_arithmetic_partials(kLinearOps, {"self", "source"});
  return rows.allowing_empty_shards();
}

// Returns the rows of scatter(self, dim, index, src).
Rows scatter(const OpCall& call) {
  RowList rows(call);
  add_common_dims(rows, with_unsharded_dim(call));
  return rows.allowing_empty_shards();
}

Rows scatter_add(const OpCall& call) {
  RowList rows(call);
  add_common_dims(rows, with_unsharded_dim(call));
  rows.add_arithmetic_partials(kLinearOps, {"self", "src"});
  return rows.allowing_empty_shards();
}

// Returns the rows of bucketize(self, boundaries), which counts the boundaries below an element. Counts for
// shards of the boundaries add up, and larger elements have larger counts.
Rows bucketize(const OpCall& call) {
  RowList rows(call);
  if (!has_tensor(call, "self")) {
    return {};
  }
  for (int64_t dim = 0; dim < call.tensor("self").num_dims(); ++dim) {
    rows.add_same_placement(any_shard(dim), {"self"});
  }
  rows.add(partial(), {{"boundaries", any_shard(0)}});
  rows.add_arithmetic_partials(kOrderOps, {"self"});
  return rows.allowing_empty_shards();
}

}  // namespace

void add(RuleTable& table) {
  table.add_overloads({"aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor"}, index);
  table.add_operators({"aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put"}, index_put);
  table.add_operators({"aten::index_select"}, index_select);
  table.add_operators({"aten::gather"}, gather);
  table.add_operators({"aten::index_fill"}, index_fill);
  table.add_operators({"aten::index_copy", "aten::index_reduce"}, index_written);
  table.add_operators({"aten::index_add"}, index_add);
  table.add_operators({"aten::scatter", "aten::scatter_reduce"}, scatter);
  table.add_operators({"aten::scatter_add"}, scatter_add);
  table.add_operators({"aten::bucketize"}, bucketize);
}

}  // namespace funcol::indexing_rules
