// Views and copies that permute, add, remove or select dims. Other dims stay as they are.
#include <algorithm>
#include <array>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol::view_rules {
namespace {

// Returns the rule of an operator that moves elements, and commutes with the reductions `ops`.
template <typename Ops>
Rule moves(MakeDimMap make_map, const Ops& ops) {
  return [make_map, ops](const OpCall& call) {
    RowList rows(call);
    add_mapped_dims(rows, make_map(call));
    rows.add_partials(ops);
    return rows.allowing_empty_shards();
  };
}

Rule moves(MakeDimMap make_map) { return moves(make_map, kAllPartialOps); }

// Returns the rule of a result with zeros beside the moved elements: these reductions of zeros are 0.
Rule moves_into_zeros(MakeDimMap make_map) {
  return moves(make_map, std::array{PartialOp::kSum, PartialOp::kAvg, PartialOp::kMin, PartialOp::kMax,
                                    PartialOp::kProduct});
}

// Returns the rule of real and imaginary parts. Sums of parts are parts of sums; this fails for products.
Rule parts_of_complex(MakeDimMap make_map) { return moves(make_map, kLinearOps); }

DimMap permuted(const OpCall& call) { return permutation(dims_argument(call, "dims")); }

DimMap transposed(const OpCall& call) { return with_swapped_dims(call, "dim0", "dim1"); }
DimMap axes_swapped(const OpCall& call) { return with_swapped_dims(call, "axis0", "axis1"); }

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

// Removes the named dims that have size 1, or all dims of size 1 if the call names no dims.
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

// Maps the dims to the last of `result_dims` dims. Every rank needs dims for which `is_repeated` in full.
template <typename IsRepeated>
DimMap to_last_dims(const OpCall& call, int64_t result_dims, const IsRepeated& is_repeated) {
  const int64_t shift = result_dims - num_dims(call);
  DimMap map;
  for (int64_t dim = 0; dim < num_dims(call); ++dim) {
    map.push_back(is_repeated(dim, dim + shift) ? std::nullopt : std::optional(dim + shift));
  }
  return map;
}

DimMap expanded(const OpCall& call) {
  const auto& from = call.tensors.at(0).shape;
  const auto& to = first_output(call).shape;
  return to_last_dims(call, std::ssize(to),
                      [&](int64_t dim, int64_t goes) { return from[dim] != to.at(goes); });
}

DimMap repeated(const OpCall& call) {
  const auto repeats = call.arg("repeats").integers();
  return to_last_dims(call, std::ssize(repeats),
                      [&](int64_t, int64_t goes) { return repeats.at(goes) != 1; });
}

// Returns the map of a slice. A slice of the full dim leaves the tensor as it is.
DimMap sliced(const OpCall& call) {
  const int64_t dim = dim_argument(call, "dim");
  const bool is_full = first_output(call).shape.at(dim) == call.tensors.at(0).shape.at(dim);
  return is_full ? same_dims(num_dims(call)) : with_unsharded_dim(call);
}

DimMap all_dims(const OpCall& call) { return same_dims(num_dims(call)); }
DimMap without_last_dim(const OpCall& call) { return without_dims(num_dims(call), {num_dims(call) - 1}); }

// Maps the dims of diag_embed(self, offset, dim1, dim2): the last one becomes the diagonal of dim1 and dim2.
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

// Maps the batch dims: tril and triu keep elements by their indices of the last two dims.
DimMap with_unsharded_matrix(const OpCall& call) {
  return with_unsharded_dims(num_dims(call), {num_dims(call) - 2, num_dims(call) - 1});
}

DimMap flipped(const OpCall& call) {
  return with_unsharded_dims(num_dims(call), dims_argument(call, "dims"));
}

DimMap rolled(const OpCall& call) {
  return call.arg("dims").integers().empty() ? DimMap(num_dims(call)) : flipped(call);
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::permute", "aten::permute_copy"}, moves(permuted));
  table.add_operators({"aten::transpose", "aten::transpose_copy", "aten::swapdims"}, moves(transposed));
  table.add_operators({"aten::swapaxes"}, moves(axes_swapped));
  table.add_operators({"aten::t", "aten::t_copy"}, moves(matrix_transposed));
  table.add_operators({"aten::movedim", "aten::moveaxis"}, moves(dims_moved));
  table.add_operators({"aten::unsqueeze", "aten::unsqueeze_copy"}, moves(with_inserted_dim));
  table.add_operators({"aten::squeeze", "aten::squeeze_copy"}, moves(squeezed));
  table.add_operators({"aten::expand", "aten::expand_copy"}, moves(expanded));
  table.add_operators({"aten::repeat"}, moves(repeated));
  table.add_operators({"aten::select", "aten::select_copy", "aten::unbind", "aten::unbind_copy"},
                      moves(without_dim));
  table.add_operators({"aten::slice", "aten::slice_copy"}, moves(sliced));
  table.add_operators({"aten::split", "aten::split_copy", "aten::split_with_sizes",
                       "aten::split_with_sizes_copy", "aten::chunk"},
                      moves(with_unsharded_dim));
  table.add_overloads({"aten::narrow", "aten::narrow_copy"}, moves(with_unsharded_dim));
  table.add_operators({"aten::view_as_complex", "aten::view_as_complex_copy"},
                      parts_of_complex(without_last_dim));
  table.add_operators({"aten::view_as_real", "aten::view_as_real_copy", "aten::real", "aten::imag"},
                      parts_of_complex(all_dims));
  table.add_operators({"aten::diagonal", "aten::diagonal_copy"}, moves(without_diagonal_dims));
  table.add_operators({"aten::diag_embed"}, moves_into_zeros(embedded_diagonal));
  table.add_operators({"aten::diag"}, moves_into_zeros(no_dims));
  table.add_operators({"aten::tril", "aten::triu"}, moves_into_zeros(with_unsharded_matrix));
  table.add_operators({"aten::select_backward"}, moves_into_zeros(with_inserted_dim));
  table.add_operators({"aten::slice_backward"}, moves_into_zeros(with_unsharded_dim));
  table.add_operators({"aten::flip"}, moves(flipped));
  table.add_operators({"aten::roll"}, moves(rolled));
}

}  // namespace funcol::view_rules
