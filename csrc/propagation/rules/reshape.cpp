#include "propagation/rules/reshape.h"

#include <algorithm>
#include <functional>
#include <set>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol {
namespace reshape_rules {
namespace {

std::vector<int64_t> sizes_of(const std::vector<int64_t>& dims, const std::vector<int64_t>& shape) {
  std::vector<int64_t> sizes;
  sizes.reserve(dims.size());
  for (const int64_t dim : dims) {
    sizes.push_back(shape[dim]);
  }
  return sizes;
}

// Returns the indices of the rank at `coordinate` in a group's dims, flattened to one.
Intervals flat_local_indices(const std::vector<int64_t>& dims, const std::vector<int64_t>& shape,
                             const Layout& layout, const Mesh& mesh, const Coordinate& coordinate) {
  std::vector<Intervals> held;
  held.reserve(dims.size());
  for (const int64_t dim : dims) {
    held.push_back(local_indices(layout, mesh, dim, shape[dim], coordinate));
  }
  return flat_indices(sizes_of(dims, shape), held);
}

void add_axes_cutting(const std::vector<int64_t>& dims, const Layout& layout, std::set<int64_t>& axes) {
  for (const int64_t dim : dims) {
    const auto& cutting = layout.axes_of(dim);
    axes.insert(cutting.begin(), cutting.end());
  }
}

// Returns true if each step along an axis moves a rank's indices of the dims by the same number: all shards
// have one size, and no axis cuts the pieces of a strided shard.
bool is_translated(const std::vector<int64_t>& dims, const std::vector<int64_t>& shape, const Layout& layout,
                   const Mesh& mesh) {
  return std::ranges::all_of(dims, [&](int64_t dim) {
    const auto& axes = layout.axes_of(dim);
    const auto is_strided = [&](int64_t axis) { return layout.placements[axis].split_factor != 1; };
    const auto strided = std::ranges::find_if(axes, is_strided);
    return is_cut_evenly(layout, mesh, dim, shape[dim]) &&
           (strided == axes.end() || strided + 1 == axes.end());
  });
}

// Returns true if `visit` accepts the first rank and, for each axis, the rank one step from it.
bool for_first_steps(const Mesh& mesh, const std::set<int64_t>& axes,
                     const std::function<bool(const Coordinate&)>& visit) {
  Coordinate coordinate(mesh.sizes.size(), 0);
  return visit(coordinate) && std::ranges::all_of(axes, [&](int64_t axis) {
           coordinate[axis] = std::min<int64_t>(1, mesh.sizes[axis] - 1);
           const bool agrees = visit(coordinate);
           coordinate[axis] = 0;
           return agrees;
         });
}

// Returns true if every rank's shard of the input, in another shape, is its shard of the output.
bool is_exact(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const auto& from = call.tensors[0].shape;
  const auto& to = first_output(call).shape;
  const auto& input = composition.inputs[0];
  const auto& output = first_output(call, composition);
  if (from == to && input == output) {
    return true;
  }
  if (num_elements(from) == 0) {
    // The tensor has no elements, but the sizes of the shards must still be right.
    return std::ranges::none_of(input.placements, [](const auto& placement) { return placement.is_shard(); });
  }
  return std::ranges::all_of(dim_groups(from, to), [&](const DimGroup& group) {
    std::set<int64_t> axes;
    add_axes_cutting(group.from, input, axes);
    add_axes_cutting(group.to, output, axes);
    const auto agrees = [&](const Coordinate& coordinate) {
      return flat_local_indices(group.from, from, input, mesh, coordinate) ==
             flat_local_indices(group.to, to, output, mesh, coordinate);
    };
    if (is_translated(group.from, from, input, mesh) && is_translated(group.to, to, output, mesh)) {
      return axes.empty() || for_first_steps(mesh, axes, agrees);
    }
    return for_all_coordinates(mesh, {axes.begin(), axes.end()}, agrees);
  });
}

// Adds rows for dim `from` that becomes dim `to`, or a part of it. `before_from` and `before_to` are the
// numbers of indices of the dims before them in the group. A shard of a dim after others is a strided shard
// of the flattened dim, with a piece for each index of the dims before it. If axes cut these dims, too, there
// are fewer pieces: a divisor of that number.
void add_rows_of_pair(RowList& rows, int64_t from, int64_t before_from, int64_t to, int64_t before_to) {
  if (before_from % before_to != 0 && before_to % before_from != 0) {
    return;
  }
  rows.add(any_shard(to), {any_shard(from)});
  const bool is_behind = before_from > before_to;
  for (const int64_t num_pieces : divisors(is_behind ? before_from / before_to : before_to / before_from)) {
    if (num_pieces > 1) {
      rows.add(Placement::shard(to, is_behind ? num_pieces : 1),
               {Placement::shard(from, is_behind ? 1 : num_pieces)});
    }
  }
}

void add_rows_of_group(RowList& rows, const DimGroup& group, const std::vector<int64_t>& from_shape,
                       const std::vector<int64_t>& to_shape) {
  const bool is_lone = group.from.size() == 1 && group.to.size() == 1;
  int64_t before_from = 1;
  for (const int64_t from : group.from) {
    int64_t before_to = 1;
    for (const int64_t to : group.to) {
      if (is_lone || (from_shape[from] > 1 && to_shape[to] > 1)) {
        add_rows_of_pair(rows, from, before_from, to, before_to);
      }
      before_to *= to_shape[to];
    }
    before_from *= from_shape[from];
  }
}

Rows reshaped(const OpCall& call) {
  RowList rows(call);
  const auto& from = call.tensors.at(0).shape;
  const auto& to = first_output(call).shape;
  if (from == to) {
    add_mapped_dims(rows, same_dims(num_dims(call)));
    rows.add_same_placement(any_mask());
  } else if (num_elements(from) > 0) {
    for (const auto& group : dim_groups(from, to)) {
      add_rows_of_group(rows, group, from, to);
    }
  }
  rows.add_partials(kAllPartialOps);
  return rows.allowing_empty_shards(is_exact);
}

}  // namespace
}  // namespace reshape_rules

std::vector<DimGroup> dim_groups(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  std::vector<DimGroup> groups;
  size_t i = 0;
  size_t j = 0;
  while (i < from.size() || j < to.size()) {
    DimGroup group;
    const bool lone_from = i < from.size() && from[i] == 1 && (j == to.size() || to[j] != 1);
    const bool lone_to = !lone_from && j < to.size() && to[j] == 1 && (i == from.size() || from[i] != 1);
    if (!lone_to) {
      group.from.push_back(static_cast<int64_t>(i));
    }
    if (!lone_from) {
      group.to.push_back(static_cast<int64_t>(j));
    }
    int64_t from_size = lone_to ? 1 : from.at(i++);
    int64_t to_size = lone_from ? 1 : to.at(j++);
    while (from_size != to_size) {
      if (from_size < to_size) {
        group.from.push_back(static_cast<int64_t>(i));
        from_size *= from.at(i++);
      } else {
        group.to.push_back(static_cast<int64_t>(j));
        to_size *= to.at(j++);
      }
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

Intervals flat_indices(const std::vector<int64_t>& sizes, const std::vector<Intervals>& held) {
  // From the last dim to the first: the indices of the dims after it are repeated for each index.
  Intervals inner{{0, 1}};
  int64_t inner_size = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    Intervals outer;
    const bool holds_all_behind = inner == Intervals{{0, inner_size}};
    for (const auto& interval : held[dim]) {
      if (holds_all_behind) {
        outer.push_back({interval.begin * inner_size, interval.size * inner_size});
        continue;
      }
      for (int64_t index = interval.begin; index < interval.end(); ++index) {
        for (const auto& behind : inner) {
          append(outer, {index * inner_size + behind.begin, behind.size});
        }
      }
    }
    inner = std::move(outer);
    inner_size *= sizes[dim];
  }
  return inner;
}

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> found;
  for (int64_t divisor = 1; divisor * divisor <= number; ++divisor) {
    if (number % divisor == 0) {
      found.push_back(divisor);
      if (divisor != number / divisor) {
        found.push_back(number / divisor);
      }
    }
  }
  std::ranges::sort(found);
  return found;
}

namespace reshape_rules {

void add(RuleTable& table) {
  table.add_overloads(
      {"aten::view", "aten::view_copy", "aten::view_copy.out", "aten::reshape", "aten::flatten.using_ints",
       "aten::_unsafe_view", "aten::_unsafe_view.out", "aten::_reshape_copy"},
      reshaped);
}

}  // namespace reshape_rules
}  // namespace funcol
