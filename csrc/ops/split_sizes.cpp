#include "ops/split_sizes.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/process_group.h"

namespace funcol {

using c10::SymInt;

void check_split_sizes(c10::SymIntArrayRef split_sizes, const char* name, const c10d::ProcessGroup& group,
                       const char* op) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(split_sizes.size()) == group.getSize(), "funcol::", op, ": ", name,
                    " has ", split_sizes.size(), " entries, but group '", group_name(group), "' has ",
                    group.getSize(), " ranks. Pass one size per rank.");
  const auto is_size = [](const SymInt& size) { return size.sym_ge(0).expect_true(__FILE__, __LINE__); };
  TORCH_CHECK_VALUE(std::ranges::all_of(split_sizes, is_size), "funcol::", op, ": ", name, " is ",
                    split_sizes, ". Sizes must not be negative.");
}

void check_own_splits(at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                      const c10d::ProcessGroup& group, const char* op) {
  const auto rank = group.getRank();
  TORCH_CHECK_VALUE(output_splits[rank] == input_splits[rank], "funcol::", op, ": rank ", rank, " sends ",
                    input_splits[rank], " rows to itself and expects ", output_splits[rank],
                    " from itself: it sends ", input_splits, " rows to the ranks and expects ", output_splits,
                    ". Pass lists that have the same number at this rank's place.");
}

SymInt sum(c10::SymIntArrayRef sizes) { return std::accumulate(sizes.begin(), sizes.end(), SymInt(0)); }

SymSizes sizes_of_parts(const SymInt& whole, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                        const c10d::ProcessGroup& group, const char* op) {
  if (!split_sizes.has_value()) {
    const SymInt num_ranks(group.getSize());
    TORCH_CHECK_VALUE((whole % num_ranks).sym_eq(0).expect_true(__FILE__, __LINE__), "funcol::", op, ": dim ",
                      dim, " has size ", whole, ", not divisible by the ", group.getSize(),
                      " ranks of group '", group_name(group),
                      "'. Pad it, use another dim, or pass split_sizes.");
    return SymSizes(group.getSize(), whole / num_ranks);
  }
  check_split_sizes(*split_sizes, "split_sizes", group, op);
  auto sizes = split_sizes->vec();
  const auto total = sum(sizes);
  TORCH_CHECK_VALUE(total.sym_eq(whole).expect_true(__FILE__, __LINE__), "funcol::", op, ": split_sizes ",
                    *split_sizes, " sum up to ", total, ", but dim ", dim, " has size ", whole,
                    ". They must be equal.");
  return sizes;
}

SymSizes sizes_of_shards(const SymInt& shard, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                         const c10d::ProcessGroup& group, const char* op) {
  if (!split_sizes.has_value()) {
    return SymSizes(group.getSize(), shard);
  }
  check_split_sizes(*split_sizes, "split_sizes", group, op);
  auto sizes = split_sizes->vec();
  TORCH_CHECK_VALUE(sizes[group.getRank()].sym_eq(shard).expect_true(__FILE__, __LINE__), "funcol::", op,
                    ": split_sizes is ", *split_sizes, ", but dim ", dim, " has size ", shard, " on rank ",
                    group.getRank(),
                    ". Pass the same list on all ranks, with each rank's own size at its place.");
  return sizes;
}

TracedParts::TracedParts(const at::Tensor& like, int64_t dim, SymSizes part_sizes)
    : dim(dim), sizes(std::move(part_sizes)), shape(like.sym_sizes().vec()) {
  for (const auto& size : sizes) {
    auto& numel = numels.emplace_back(size);
    for (int64_t i = 0; i < like.dim(); ++i) {
      numel = i == dim ? numel : numel * shape[i];
    }
  }
}

at::Tensor TracedParts::concatenated(std::vector<at::Tensor> flat_parts) const {
  auto part_shape = shape;
  for (size_t rank = 0; rank < flat_parts.size(); ++rank) {
    part_shape[dim] = sizes[rank];
    flat_parts[rank] = flat_parts[rank].view_symint(part_shape);
  }
  return at::cat(flat_parts, dim);
}

}  // namespace funcol
