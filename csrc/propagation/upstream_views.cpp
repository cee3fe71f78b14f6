#include "propagation/upstream_views.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/reshape.h"
#include "propagation/rules/rows.h"

namespace funcol {
namespace {

using Shape = std::vector<int64_t>;

// For each dim of the input, the dim of the result that holds its shards, where every rank's part of the
// input becomes that of the result.
DimMap reshaped_dims(const Shape& from, const Shape& to) {
  DimMap map(from.size());
  for (const auto& group : dim_groups(from, to)) {
    const auto first = std::ranges::find_if(group.to, [&](int64_t dim) { return to[dim] > 1; });
    if (!group.from.empty() && first != group.to.end() && (group.from.size() == 1 || group.to.size() == 1)) {
      map[group.from[0]] = *first;
    }
  }
  return map;
}

DimMap permuted_dims(const std::vector<int64_t>& dims) {
  DimMap map(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    map[dims[i]] = static_cast<int64_t>(i);
  }
  return map;
}

DimMap transposed_dims(const OpCall& call, const Shape& shape) {
  const auto num_dims = static_cast<int64_t>(shape.size());
  auto map = same_dims(num_dims);
  if (num_dims > 0) {
    std::swap(map[counted_from_0(call, call.arg("dim0").integer(), num_dims)],
              map[counted_from_0(call, call.arg("dim1").integer(), num_dims)]);
  }
  return map;
}

std::optional<DimMap> dims_of_view(const OpCall& call, const Shape& from, const Shape& to) {
  const std::string_view op = call.op;
  if (op == "aten::view" || op == "aten::_unsafe_view" || op == "aten::reshape" || op == "aten::view_copy") {
    return num_elements(from) == 0 ? std::nullopt : std::optional(reshaped_dims(from, to));
  }
  if (op == "aten::permute") {
    return permuted_dims(dims_argument(call, "dims"));
  }
  if (op == "aten::transpose.int") {
    return transposed_dims(call, from);
  }
  if (op == "aten::unsqueeze") {
    return with_inserted_dim(call);
  }
  if (op == "aten::expand" || op == "aten::expand_copy") {
    DimMap map(from.size());
    std::iota(map.begin(), map.end(), static_cast<int64_t>(to.size() - from.size()));
    return map;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::vector<Placement>> upstream_view(const OpCall& call,
                                                    const std::vector<Placement>& placements,
                                                    const Mesh& mesh) {
  if (call.tensors.size() != 1 || call.outputs.size() != 1) {
    return std::nullopt;
  }
  const auto& output = call.outputs[0];
  if (!output) {
    return std::nullopt;
  }
  const auto& from = call.tensors[0].shape;
  const auto& to = output->shape;
  const auto map = dims_of_view(call, from, to);
  if (!map) {
    return std::nullopt;
  }
  auto viewed = placements;
  std::vector<int64_t> num_shards(from.size(), 1);
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto& placement = placements[axis];
    if (!placement.is_shard()) {
      continue;
    }
    const auto target = placement.is_strided() ? std::nullopt : map->at(placement.dim);
    if (!target) {
      return std::nullopt;
    }
    const auto size = from[placement.dim];
    auto& count = num_shards[placement.dim];
    count *= mesh.sizes[axis];
    if (size != to[*target] && (size <= 1 || size % count != 0 || to[*target] % count != 0)) {
      return std::nullopt;
    }
    viewed[axis] = Placement::shard(*target);
  }
  return viewed;
}

}  // namespace funcol
