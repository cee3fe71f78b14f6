// Operators that read or write elements where tensors of indices say.
#include <algorithm>
#include <iterator>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/families.h"

namespace funcol {
namespace {

constexpr std::array kKeepConstants{PartialOp::kAvg, PartialOp::kMax, PartialOp::kMin};

constexpr int64_t kUnknownSize = -1;

// index.Tensor, index_put: which dims are indexed, and where the dims that the indices broadcast to go in
// what is read, or is to be written. Indexed neighbours are replaced where they are; otherwise the indices'
// dims go first.
struct Indexing {
  std::vector<size_t> indices;        // among the call's tensors
  std::vector<int64_t> indexed_dims;  // of self
  std::vector<int64_t> index_shape;   // that the indices broadcast to
  int64_t first_index_dim = 0;        // in the result
  DimMap map;                         // of self's dims in the result
  bool has_masks = false;             // whose elements are not paired with those of other indices

  int64_t num_index_dims() const { return static_cast<int64_t>(index_shape.size()); }
  int64_t num_result_dims() const {
    return num_index_dims() + static_cast<int64_t>(map.size() - indexed_dims.size());
  }
};

// The size of the dim that is `from_last` dims before the last; 1 if there is none.
int64_t size_from_last(const std::vector<int64_t>& shape, int64_t from_last) {
  const auto dim = static_cast<int64_t>(shape.size()) - 1 - from_last;
  return dim < 0 ? 1 : shape[dim];
}

std::vector<int64_t> broadcast_shape(const OpCall& call, const std::vector<size_t>& tensors) {
  int64_t num_dims = 0;
  for (const size_t tensor : tensors) {
    num_dims = std::max(num_dims, call.tensors[tensor].num_dims());
  }
  std::vector<int64_t> shape(num_dims, 1);
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    for (const size_t tensor : tensors) {
      const int64_t size = size_from_last(call.tensors[tensor].shape, num_dims - 1 - dim);
      shape[dim] = size == 1 ? shape[dim] : size;
    }
  }
  return shape;
}

bool is_mask(const TensorMeta& index) { return index.dtype == Dtype::kBool || index.dtype == Dtype::kUInt8; }

// The shape that indices broadcast to. A mask is one index for each element that it has set, which is not
// known beforehand.
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

// Nothing if there is no index, or one is a mask without dims. Other masks stand for as many dims as they
// have.
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

// Where the indices stand when dim `dim` of what they broadcast to is cut.
void place_indices(const OpCall& call, const Indexing& indexing, int64_t dim,
                   std::vector<Placement>& inputs) {
  for (const size_t index : indexing.indices) {
    const int64_t own = dim - (indexing.num_index_dims() - call.tensors[index].num_dims());
    inputs[index] = own >= 0 && call.tensors[index].shape[own] == indexing.index_shape[dim] ? any_shard(own)
                                                                                            : replicate();
  }
}

void add_indexed_dims(const OpCall& call, RowList& rows, const Indexing& indexing) {
  for (size_t dim = 0; dim < indexing.map.size(); ++dim) {
    if (const auto& goes = indexing.map[dim]) {
      rows.add(any_shard(*goes), inputs_by_name(call, {{"self", any_shard(static_cast<int64_t>(dim))}}));
    }
  }
  for (int64_t dim = 0; dim < indexing.num_index_dims(); ++dim) {
    if (indexing.index_shape[dim] != 1 && !indexing.has_masks) {
      std::vector<Placement> inputs(call.tensors.size(), replicate());
      place_indices(call, indexing, dim, inputs);
      rows.add(any_shard(indexing.first_index_dim + dim), std::move(inputs));
    }
  }
}

Rows index(const OpCall& call) {
  RowList rows(call);
  if (const auto indexing = indexing_of(call)) {
    add_indexed_dims(call, rows, *indexing);
  }
  for (const auto op : kAllPartialOps) {
    rows.add(partial(op), inputs_by_name(call, {{"self", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// index_put(self, indices, values, accumulate): values are broadcast to what index would read.
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
    const int64_t own = *goes - (indexing->num_result_dims() - values.num_dims());
    const auto shard = any_shard(static_cast<int64_t>(dim));
    const bool has_dim = own >= 0 && values.shape[own] == call.tensor("self").shape[dim];
    rows.add(shard,
             inputs_by_name(call, {{"self", shard}, {"values", has_dim ? any_shard(own) : replicate()}}));
  }
  const auto add_partial = [&](PartialOp op) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"values", partial(op)}}));
  };
  // Of values for the same element one is taken, not the same on every rank: only sums of them may pend. A
  // mask has no element twice.
  if (flag_or(call, "accumulate", false)) {
    std::ranges::for_each(kLinearOps, add_partial);
  } else if (indexing->has_masks && indexing->indices.size() == 1) {
    std::ranges::for_each(kAllPartialOps, add_partial);
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// index_select(self, dim, index)
Rows index_select(const OpCall& call) {
  RowList rows(call);
  const int64_t num_dims = call.tensor("self").num_dims();
  const int64_t indexed = dim_argument(call, "dim", num_dims);
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    if (dim != indexed) {
      rows.add(any_shard(dim), inputs_by_name(call, {{"self", any_shard(dim)}}));
    } else if (call.tensor("index").num_dims() == 1) {
      rows.add(any_shard(dim), inputs_by_name(call, {{"index", any_shard(0)}}));
    }
  }
  for (const auto op : kAllPartialOps) {
    rows.add(partial(op), inputs_by_name(call, {{"self", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// There is no element 0 for indices that are masked where a rank has nothing of the dim.
bool all_have_elements(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const auto& self = call.tensor("self");
  if (self.num_dims() == 0) {
    return true;
  }
  const int64_t dim = dim_argument(call, "dim", self.num_dims());
  return leaves_none_empty(composition.inputs[call.arg("self").tensor()], mesh, dim, self.shape[dim]);
}

// gather(self, dim, index): elements of the dim are picked where the index stands in the other dims, in which
// it may be shorter.
Rows gather(const OpCall& call) {
  RowList rows(call);
  const auto& self = call.tensor("self");
  const auto& index = call.tensor("index");
  if (self.num_dims() > 0 && index.num_dims() == self.num_dims()) {
    const int64_t gathered = dim_argument(call, "dim", self.num_dims());
    if (index.shape[gathered] == 1) {
      rows.add(masked(0), inputs_by_name(call, {{"self", Placement::shard(gathered)}, {"index", masked(0)}}));
    }
    rows.add(any_shard(gathered), inputs_by_name(call, {{"index", any_shard(gathered)}}));
    for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
      if (dim != gathered && self.shape[dim] == index.shape[dim]) {
        rows.add_alike(any_shard(dim));
      }
    }
  }
  for (const auto op : kAllPartialOps) {
    rows.add(partial(op), inputs_by_name(call, {{"self", partial(op)}}));
  }
  return {.rows = rows.take(),
          .allows_empty_shards = true,
          .is_legal = all_have_elements,
          .masks = {{self.shape, self.num_dims() > 0 ? dim_argument(call, "dim", self.num_dims()) : 0}}};
}

// A row for each dim of self but the one that is indexed; the source has self's other dims.
void add_other_dims(const OpCall& call, RowList& rows) {
  const int64_t num_dims = call.tensor("self").num_dims();
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    if (dim != dim_argument(call, "dim", num_dims)) {
      rows.add(any_shard(dim), inputs_by_name(call, {{"self", any_shard(dim)}, {"source", any_shard(dim)}}));
    }
  }
}

Rows index_fill(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows);
  if (has_tensor(call, "value")) {
    for (const auto op : kAllPartialOps) {
      rows.add(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"value", partial(op)}}));
    }
  }
  for (const auto op : kKeepConstants) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}}));
  }
  if (real_number(call, "value") == 0.0) {
    rows.add_arithmetic(partial(), inputs_by_name(call, {{"self", partial()}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

Rows index_written(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

Rows index_add(const OpCall& call) {
  RowList rows(call);
  add_other_dims(call, rows);
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"source", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// scatter(self, dim, index, src): dims that self, index and source have as long are cut in all.
void add_scattered_dims(const OpCall& call, RowList& rows) {
  const int64_t num_dims = call.tensor("self").num_dims();
  add_dims_alike(call, rows, whole_dims(num_dims, {dim_argument(call, "dim", num_dims)}));
}

Rows scatter(const OpCall& call) {
  RowList rows(call);
  add_scattered_dims(call, rows);
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

Rows scatter_add(const OpCall& call) {
  RowList rows(call);
  add_scattered_dims(call, rows);
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"src", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

// bucketize(self, boundaries): how many boundaries lie below adds up over these, and grows with self.
Rows bucketize(const OpCall& call) {
  RowList rows(call);
  if (!has_tensor(call, "self")) {
    return {};
  }
  for (int64_t dim = 0; dim < call.tensor("self").num_dims(); ++dim) {
    rows.add(any_shard(dim), inputs_by_name(call, {{"self", any_shard(dim)}}));
  }
  rows.add(partial(), inputs_by_name(call, {{"boundaries", any_shard(0)}}));
  for (const auto op : kOrderOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}}));
  }
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

}  // namespace

void add_indexing_rules(RuleTable& table) {
  table.add_overloads({"aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor"}, index);
  table.add_all_overloads({"aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put"}, index_put);
  table.add_all_overloads({"aten::index_select"}, index_select);
  table.add_all_overloads({"aten::gather"}, gather);
  table.add_all_overloads({"aten::index_fill"}, index_fill);
  table.add_all_overloads({"aten::index_copy", "aten::index_reduce"}, index_written);
  table.add_all_overloads({"aten::index_add"}, index_add);
  table.add_all_overloads({"aten::scatter", "aten::scatter_reduce"}, scatter);
  table.add_all_overloads({"aten::scatter_add"}, scatter_add);
  table.add_all_overloads({"aten::bucketize"}, bucketize);
}

}  // namespace funcol
