#include "propagation/rules/dim_map.h"

#include <algorithm>
#include <utility>

namespace funcol {
namespace {

// Returns the dim of a tensor that is broadcast to dim `dim` of `num_dims`; negative if the tensor lacks it.
int64_t own_dim(const TensorMeta& meta, int64_t dim, int64_t num_dims) {
  return dim - (num_dims - meta.num_dims());
}

}  // namespace

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

DimMap with_unsharded_dims(int64_t num_dims, const std::vector<int64_t>& unsharded) {
  auto map = same_dims(num_dims);
  for (const int64_t dim : unsharded) {
    if (dim < num_dims) {
      map[dim] = std::nullopt;
    }
  }
  return map;
}

DimMap permutation(const std::vector<int64_t>& sources) {
  DimMap map(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    map.at(sources[i]) = static_cast<int64_t>(i);
  }
  return map;
}

std::vector<int64_t> dims_argument(const OpCall& call, std::string_view name) {
  std::vector<int64_t> dims;
  for (const int64_t dim : call.arg(name).integers()) {
    dims.push_back(counted_from_0(call, dim, num_dims(call)));
  }
  return dims;
}

DimMap without_dim(const OpCall& call) { return without_dims(num_dims(call), {dim_argument(call, "dim")}); }

DimMap with_unsharded_dim(const OpCall& call) {
  return with_unsharded_dims(num_dims(call), {dim_argument(call, "dim")});
}

DimMap with_inserted_dim(const OpCall& call) {
  const int64_t inserted = dim_argument(call, "dim", num_dims(call) + 1);
  DimMap map;
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    map.emplace_back(dim < inserted ? dim : dim + 1);
  }
  return map;
}

DimMap without_diagonal_dims(const OpCall& call) {
  return without_dims(num_dims(call), {dim_argument(call, "dim1"), dim_argument(call, "dim2")});
}

DimMap with_swapped_dims(const OpCall& call, std::string_view first, std::string_view second) {
  auto map = same_dims(num_dims(call));
  if (!map.empty()) {
    std::swap(map[dim_argument(call, first)], map[dim_argument(call, second)]);
  }
  return map;
}

void add_mapped_dims(RowList& rows, const DimMap& map) {
  for (size_t dim = 0; dim < map.size(); ++dim) {
    if (const auto& goes = map[dim]) {
      const auto shard = any_shard(static_cast<int64_t>(dim));
      rows.add(any_shard(*goes), std::vector<Placement>(rows.call().tensors.size(), shard));
    }
  }
}

void add_mapped_dims(RowList& rows, const DimMap& map, std::string_view argument) {
  for (size_t dim = 0; dim < map.size(); ++dim) {
    if (const auto& goes = map[dim]) {
      rows.add(any_shard(*goes), {{argument, any_shard(static_cast<int64_t>(dim))}});
    }
  }
}

void add_common_dims(RowList& rows, const DimMap& map) {
  const auto& tensors = rows.call().tensors;
  for (const auto& dim : map) {
    const auto has_dim = [&](const TensorMeta& meta) {
      return *dim < meta.num_dims() && meta.shape[*dim] == tensors[0].shape[*dim];
    };
    if (dim && std::ranges::all_of(tensors, has_dim)) {
      rows.add_same_placement(any_shard(*dim));
    }
  }
}

std::vector<int64_t> broadcast_shape(const OpCall& call, const std::vector<size_t>& tensors) {
  int64_t num_dims = 0;
  for (const size_t tensor : tensors) {
    num_dims = std::max(num_dims, call.tensors[tensor].num_dims());
  }
  std::vector<int64_t> shape(num_dims, 1);
  for (const size_t tensor : tensors) {
    const auto& meta = call.tensors[tensor];
    for (int64_t dim = num_dims - meta.num_dims(); dim < num_dims; ++dim) {
      const int64_t size = meta.shape[own_dim(meta, dim, num_dims)];
      shape[dim] = size == 1 ? shape[dim] : size;
    }
  }
  return shape;
}

Placement broadcast_shard(const TensorMeta& meta, int64_t dim, int64_t num_dims, int64_t size) {
  const int64_t own = own_dim(meta, dim, num_dims);
  return own >= 0 && meta.shape[own] == size ? any_shard(own) : replicate();
}

Placement broadcast_shard(const TensorMeta& meta, int64_t dim, int64_t num_dims) {
  const int64_t own = own_dim(meta, dim, num_dims);
  return own >= 0 && meta.shape[own] != 1 ? any_shard(own) : replicate();
}

}  // namespace funcol
