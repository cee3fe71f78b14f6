#include "propagation/upstream_views.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "layout/shards.h"
#include "propagation/rules/dim_map.h"
#include "propagation/rules/reshape.h"
#include "propagation/rules/row_list.h"

namespace funcol {
namespace {

using Shape = std::vector<int64_t>;

bool is_reshape(std::string_view op) {
  return op == "aten::view" || op == "aten::_unsafe_view" || op == "aten::reshape" || op == "aten::view_copy";
}

// Returns true for a reshape whose input PyTorch never redistributes; it makes strided shards instead.
bool is_strict(std::string_view op) { return op == "aten::view" || op == "aten::_unsafe_view"; }

// Maps each dim of the input to the dim of the result that holds its shards, if every rank's part of the
// input becomes its part of the result.
DimMap reshaped_dims(const std::vector<DimGroup>& groups, size_t num_dims, const Shape& to) {
  DimMap map(num_dims);
  for (const auto& group : groups) {
    const auto first = std::ranges::find_if(group.to, [&](int64_t dim) { return to[dim] > 1; });
    if (!group.from.empty() && first != group.to.end() && (group.from.size() == 1 || group.to.size() == 1)) {
      map[group.from[0]] = *first;
    }
  }
  return map;
}

std::optional<DimMap> dims_of_view(const OpCall& call, const Shape& from, const Shape& to) {
  const std::string_view op = call.op;
  if (op == "aten::permute") {
    return permutation(dims_argument(call, "dims"));
  }
  if (op == "aten::transpose.int") {
    return with_swapped_dims(call, "dim0", "dim1");
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

// The placements of the result, found axis by axis.
class ViewedShards {
 public:
  // Keeps references to its arguments, which must outlive this. `groups` are those of a reshape, else empty.
  ViewedShards(const Shape& from, const Shape& to, const DimMap& map, const std::vector<DimGroup>& groups,
               const Layout& layout, const Mesh& mesh, bool makes_strided)
      : from_(from),
        to_(to),
        map_(map),
        groups_(groups),
        layout_(layout),
        mesh_(mesh),
        makes_strided_(makes_strided),
        num_shards_(from.size(), 1) {}

  std::optional<std::vector<Placement>> find() {
    auto viewed = layout_.placements;
    for (size_t axis = 0; axis < viewed.size(); ++axis) {
      const auto held = viewed[axis];
      if (held.is_shard()) {
        const auto shard = held.is_strided() ? strided_shard(axis) : plain_shard(axis);
        if (!shard) {
          return std::nullopt;
        }
        viewed[axis] = *shard;
        num_shards_[held.dim] *= mesh_.sizes[axis];
      }
    }
    return viewed;
  }

 private:
  std::optional<Placement> plain_shard(size_t axis) const {
    const auto dim = layout_.placements[axis].dim;
    const auto target = map_.at(dim);
    if (!target) {
      return flattened_shard(dim);
    }
    const auto size = from_[dim];
    const auto count = num_shards_[dim] * mesh_.sizes[axis];
    if (size != to_[*target] && (size <= 1 || size % count != 0 || to_[*target] % count != 0)) {
      return std::nullopt;
    }
    return Placement::shard(*target);
  }

  // Returns the placement of a dim flattened after others: shards are pieces repeated for each index of
  // those.
  std::optional<Placement> flattened_shard(int64_t dim) const {
    const auto* const group = group_of(dim);
    if (!makes_strided_ || group == nullptr || group->to.size() != 1 ||
        std::ranges::any_of(group->from, [&](int64_t other) {
          return has_strided_shards(other) || !is_cut_evenly(layout_, mesh_, other, from_[other]);
        })) {
      return std::nullopt;
    }
    int64_t num_pieces = 1;
    for (const int64_t before : group->from) {
      if (before == dim) {
        break;
      }
      num_pieces *= from_[before] / num_shards_[before];
    }
    return num_pieces == 1 ? std::nullopt : std::optional(Placement::shard(group->to[0], num_pieces));
  }

  // Returns the placement of a strided shard: its pieces become a dim that is split off, or stay as they are.
  std::optional<Placement> strided_shard(size_t axis) const {
    const auto& shard = layout_.placements[axis];
    const auto target = map_.at(shard.dim);
    if (!target) {
      return std::nullopt;
    }
    if (from_[shard.dim] == to_[*target]) {
      return Placement::shard(*target, shard.split_factor);
    }
    const auto* const group = group_of(shard.dim);
    if (group == nullptr || group->from.size() != 1 || is_cut_beside(axis)) {
      return std::nullopt;
    }
    int64_t num_pieces = 1;  // of the dims before, by all axes
    for (const int64_t dim : group->to) {
      if (num_pieces == shard.split_factor * num_shards_[shard.dim]) {
        return to_[dim] % mesh_.sizes[axis] == 0 ? std::optional(Placement::shard(dim)) : std::nullopt;
      }
      num_pieces *= to_[dim];
    }
    return std::nullopt;
  }

  // Returns true if PyTorch's rule may refuse to take the strided shards of `axis` apart, since other axes
  // cut the same dim: it takes the shards of an earlier axis for those of `axis`, too.
  bool is_cut_beside(size_t axis) const {
    const auto dim = layout_.placements[axis].dim;
    const bool divides_first = to_[group_of(dim)->to[0]] % mesh_.sizes[axis] == 0;
    return mesh_.sizes[axis] == 1 || std::ranges::any_of(layout_.axes_of(dim), [&](int64_t axis_of_dim) {
             const auto other = static_cast<size_t>(axis_of_dim);
             return other != axis &&
                    (layout_.placements[other].is_strided() || (other < axis && !divides_first));
           });
  }

  bool has_strided_shards(int64_t dim) const {
    return std::ranges::any_of(layout_.axes_of(dim),
                               [&](int64_t axis) { return layout_.placements[axis].is_strided(); });
  }

  const DimGroup* group_of(int64_t dim) const {
    const auto group = std::ranges::find_if(
        groups_, [&](const auto& one) { return std::ranges::find(one.from, dim) != one.from.end(); });
    return group == groups_.end() ? nullptr : &*group;
  }

  const Shape& from_;
  const Shape& to_;
  const DimMap& map_;
  const std::vector<DimGroup>& groups_;
  const Layout& layout_;
  const Mesh& mesh_;
  bool makes_strided_;
  std::vector<int64_t> num_shards_;  // by dim, by the axes so far
};

}  // namespace

std::optional<std::vector<Placement>> upstream_view(const OpCall& call, const Layout& layout,
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
  std::vector<DimGroup> groups;
  std::optional<DimMap> map;
  if (!is_reshape(call.op)) {
    map = dims_of_view(call, from, to);
  } else if (num_elements(from) > 0) {
    groups = dim_groups(from, to);
    map = reshaped_dims(groups, from.size(), to);
  }
  return map ? ViewedShards(from, to, *map, groups, layout, mesh, is_strict(call.op)).find() : std::nullopt;
}

}  // namespace funcol
