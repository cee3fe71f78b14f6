#include "propagation/rules/dim_map.h"

#include <algorithm>

namespace funcol {

DimMap same_dims(int64_t num_dims) { return without_dims(num_dims, {}); }

DimMap without_dims(int64_t num_dims, const std::vector<int64_t>& removed) {
  DimMap map;
  int64_t next = 0;
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    const bool goes = std::ranges::find(removed, dim) != removed.end();
    map.push_back(goes ? std::nullopt : std::optional(next++));
  }
  return map;
}

DimMap whole_dims(int64_t num_dims, const std::vector<int64_t>& whole) {
  auto map = same_dims(num_dims);
  for (const int64_t dim : whole) {
    if (dim < num_dims) {
      map[dim] = std::nullopt;
    }
  }
  return map;
}

std::vector<int64_t> dims_argument(const OpCall& call, std::string_view name) {
  std::vector<int64_t> dims;
  for (const int64_t dim : call.arg(name).integers()) {
    dims.push_back(counted_from_0(call, dim, call.tensors.at(0).num_dims()));
  }
  return dims;
}

void add_mapped_dims(RowList& rows, const DimMap& map) {
  for (size_t dim = 0; dim < map.size(); ++dim) {
    if (const auto& goes = map[dim]) {
      rows.add(any_shard(*goes), {any_shard(static_cast<int64_t>(dim))});
    }
  }
}

void add_dims_alike(const OpCall& call, RowList& rows, const DimMap& map) {
  for (const auto& dim : map) {
    const auto has_dim = [&](const TensorMeta& meta) {
      return *dim < meta.num_dims() && meta.shape[*dim] == call.tensors[0].shape[*dim];
    };
    if (dim && std::ranges::all_of(call.tensors, has_dim)) {
      rows.add_alike(any_shard(*dim));
    }
  }
}

}  // namespace funcol
