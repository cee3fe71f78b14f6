// Operators that pick or move dims whole: what happens to one dim is the same wherever the others are cut.
#include <algorithm>
#include <array>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/families.h"

namespace funcol {
namespace {

// Where all dims go when dim `i` of the result is dim sources[i].
DimMap permutation(const std::vector<int64_t>& sources) {
  DimMap map(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    map.at(sources[i]) = static_cast<int64_t>(i);
  }
  return map;
}

using MakeDimMap = DimMap (*)(const OpCall&);

// Rows of an operator whose results hold elements of its tensor, as far as `ops` are kept by what it does.
template <typename Ops>
Rule moves(MakeDimMap make_map, const Ops& ops) {
  return [make_map, ops](const OpCall& call) {
    RowList rows(call);
    add_mapped_dims(rows, make_map(call));
    for (const auto op : ops) {
      rows.add_alike(partial(op));
    }
    return Rows{.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
  };
}

Rule moves(MakeDimMap make_map) { return moves(make_map, kAllPartialOps); }

// And 0 elsewhere: what ranks reduce there is 0 only for reductions that keep it.
Rule moves_into_zeros(MakeDimMap make_map) {
  return moves(make_map, std::array{PartialOp::kSum, PartialOp::kAvg, PartialOp::kMin, PartialOp::kMax,
                                    PartialOp::kProduct});
}

// Parts of complex numbers: sums of these are sums of the parts, products are not.
Rule parts_of_complex(MakeDimMap make_map) { return moves(make_map, kLinearOps); }

int64_t num_dims(const OpCall& call) { return call.tensors.at(0).num_dims(); }

DimMap permuted(const OpCall& call) { return permutation(dims_argument(call, "dims")); }

DimMap swapped(const OpCall& call, std::string_view first, std::string_view second) {
  auto map = same_dims(num_dims(call));
  if (!map.empty()) {
    std::swap(map[dim_argument(call, first, num_dims(call))],
              map[dim_argument(call, second, num_dims(call))]);
  }
  return map;
}

DimMap transposed(const OpCall& call) { return swapped(call, "dim0", "dim1"); }
DimMap axes_swapped(const OpCall& call) { return swapped(call, "axis0", "axis1"); }

DimMap matrix_transposed(const OpCall& call) {
  return num_dims(call) == 2 ? DimMap{1, 0} : same_dims(num_dims(call));
}

DimMap dims_moved(const OpCall& call) {
  const auto sources = dims_argument(call, "source");
  const auto destinations = dims_argument(call, "destination");
  DimMap map(num_dims(call));
  for (size_t i = 0; i < sources.size(); ++i) {
    map.at(sources[i]) = destinations.at(i);
  }
  int64_t next = 0;
  for (auto& goes : map) {
    if (!goes) {
      while (std::ranges::find(destinations, next) != destinations.end()) {
        ++next;
      }
      goes = next++;
    }
  }
  return map;
}

// So does a gradient that is put back to where select took it from.
DimMap unsqueezed(const OpCall& call) {
  const int64_t inserted = dim_argument(call, "dim", num_dims(call) + 1);
  DimMap map;
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    map.emplace_back(dim < inserted ? dim : dim + 1);
  }
  return map;
}

// Dims of size 1 that are named go, or all if none can be named.
DimMap squeezed(const OpCall& call) {
  const auto& shape = call.tensors.at(0).shape;
  std::vector<int64_t> removed;
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    if (shape[dim] == 1) {
      removed.push_back(dim);
    }
  }
  if (call.has_arg("dim") && num_dims(call) > 0) {
    const auto named = dims_argument(call, "dim");
    std::erase_if(removed, [&](int64_t dim) { return std::ranges::find(named, dim) == named.end(); });
  }
  return without_dims(num_dims(call), removed);
}

// Dims of size 1 that are repeated are needed by every rank.
DimMap expanded(const OpCall& call) {
  const auto& from = call.tensors.at(0).shape;
  const auto& to = first_output(call).shape;
  const auto shift = static_cast<int64_t>(to.size() - from.size());
  DimMap map;
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    map.push_back(from[dim] == to.at(dim + shift) ? std::optional(dim + shift) : std::nullopt);
  }
  return map;
}

DimMap repeated(const OpCall& call) {
  const auto repeats = call.arg("repeats").integers();
  const auto shift = static_cast<int64_t>(repeats.size()) - num_dims(call);
  DimMap map;
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    map.push_back(repeats.at(dim + shift) == 1 ? std::optional(dim + shift) : std::nullopt);
  }
  return map;
}

DimMap all_but_dim(const OpCall& call) {
  return without_dims(num_dims(call), {dim_argument(call, "dim", num_dims(call))});
}

// The dim stays, but each rank needs the whole of it.
DimMap dim_kept_whole(const OpCall& call) {
  return whole_dims(num_dims(call), {dim_argument(call, "dim", num_dims(call))});
}

DimMap sliced(const OpCall& call) {
  const int64_t dim = dim_argument(call, "dim", num_dims(call));
  const auto& shape = call.tensors.at(0).shape;
  // A slice as long as the dim is the dim, unless it was taken of nothing.
  return first_output(call).shape.at(dim) == shape.at(dim) ? same_dims(num_dims(call)) : dim_kept_whole(call);
}

DimMap all_dims(const OpCall& call) { return same_dims(num_dims(call)); }
DimMap all_but_the_last(const OpCall& call) { return without_dims(num_dims(call), {num_dims(call) - 1}); }

// diagonal(self, offset, dim1, dim2): the diagonal becomes the last dim.
DimMap diagonal(const OpCall& call) {
  return without_dims(num_dims(call), {dim_argument(call, "dim1", num_dims(call)),
                                       dim_argument(call, "dim2", num_dims(call))});
}

// diag_embed(self, offset, dim1, dim2): the last dim becomes the diagonal of two.
DimMap embedded_diagonal(const OpCall& call) {
  const int64_t result_dims = num_dims(call) + 1;
  const std::vector diagonal_dims{dim_argument(call, "dim1", result_dims),
                                  dim_argument(call, "dim2", result_dims)};
  DimMap map;
  for (int64_t dim = 0; dim < result_dims; ++dim) {
    if (std::ranges::find(diagonal_dims, dim) == diagonal_dims.end()) {
      map.emplace_back(dim);
    }
  }
  map.emplace_back(std::nullopt);
  return map;
}

DimMap no_dims(const OpCall& call) { return DimMap(num_dims(call)); }

// tril and triu: which of the last two dims' elements are kept depends on where they are.
DimMap all_but_the_matrix(const OpCall& call) {
  return whole_dims(num_dims(call), {num_dims(call) - 2, num_dims(call) - 1});
}

DimMap flipped(const OpCall& call) { return whole_dims(num_dims(call), dims_argument(call, "dims")); }

DimMap rolled(const OpCall& call) {
  return call.arg("dims").integers().empty() ? DimMap(num_dims(call)) : flipped(call);
}

}  // namespace

void add_view_rules(RuleTable& table) {
  table.add_all_overloads({"aten::permute", "aten::permute_copy"}, moves(permuted));
  table.add_all_overloads({"aten::transpose", "aten::transpose_copy", "aten::swapdims"}, moves(transposed));
  table.add_all_overloads({"aten::swapaxes"}, moves(axes_swapped));
  table.add_all_overloads({"aten::t", "aten::t_copy"}, moves(matrix_transposed));
  table.add_all_overloads({"aten::movedim", "aten::moveaxis"}, moves(dims_moved));
  table.add_all_overloads({"aten::unsqueeze", "aten::unsqueeze_copy"}, moves(unsqueezed));
  table.add_all_overloads({"aten::squeeze", "aten::squeeze_copy"}, moves(squeezed));
  table.add_all_overloads({"aten::expand", "aten::expand_copy"}, moves(expanded));
  table.add_all_overloads({"aten::repeat"}, moves(repeated));
  table.add_all_overloads({"aten::select", "aten::select_copy", "aten::unbind", "aten::unbind_copy"},
                          moves(all_but_dim));
  table.add_all_overloads({"aten::slice", "aten::slice_copy"}, moves(sliced));
  table.add_all_overloads({"aten::split", "aten::split_copy", "aten::split_with_sizes",
                           "aten::split_with_sizes_copy", "aten::chunk"},
                          moves(dim_kept_whole));
  table.add_overloads({"aten::narrow", "aten::narrow_copy"}, moves(dim_kept_whole));
  table.add_all_overloads({"aten::view_as_complex", "aten::view_as_complex_copy"},
                          parts_of_complex(all_but_the_last));
  table.add_all_overloads({"aten::view_as_real", "aten::view_as_real_copy", "aten::real", "aten::imag"},
                          parts_of_complex(all_dims));
  table.add_all_overloads({"aten::diagonal", "aten::diagonal_copy"}, moves(diagonal));
  table.add_all_overloads({"aten::diag_embed"}, moves_into_zeros(embedded_diagonal));
  table.add_all_overloads({"aten::diag"}, moves_into_zeros(no_dims));
  table.add_all_overloads({"aten::tril", "aten::triu"}, moves_into_zeros(all_but_the_matrix));
  table.add_all_overloads({"aten::select_backward"}, moves_into_zeros(unsqueezed));
  table.add_all_overloads({"aten::slice_backward"}, moves_into_zeros(dim_kept_whole));
  table.add_all_overloads({"aten::flip"}, moves(flipped));
  table.add_all_overloads({"aten::roll"}, moves(rolled));
}

}  // namespace funcol
