#include "ops/parts.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/layout_change.h"

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

SymSizes sizes_of_parts(const SymInt& full_size, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                        const c10d::ProcessGroup& group, const char* op) {
  if (!split_sizes.has_value()) {
    const SymInt num_ranks(group.getSize());
    TORCH_CHECK_VALUE((full_size % num_ranks).sym_eq(0).expect_true(__FILE__, __LINE__), "funcol::", op,
                      ": dim ", dim, " has size ", full_size, ", not divisible by the ", group.getSize(),
                      " ranks of group '", group_name(group),
                      "'. Pad it, use another dim, or pass split_sizes.");
    return SymSizes(group.getSize(), full_size / num_ranks);
  }
  check_split_sizes(*split_sizes, "split_sizes", group, op);
  auto sizes = split_sizes->vec();
  const auto total = sum(sizes);
  TORCH_CHECK_VALUE(total.sym_eq(full_size).expect_true(__FILE__, __LINE__), "funcol::", op, ": split_sizes ",
                    *split_sizes, " sum up to ", total, ", but dim ", dim, " has size ", full_size,
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

namespace {

at::OptionalSymIntArrayRef as_symints(at::OptionalIntArrayRef sizes) {
  return sizes.has_value() ? at::OptionalSymIntArrayRef(c10::fromIntArrayRefSlow(*sizes))
                           : at::OptionalSymIntArrayRef();
}

std::vector<int64_t> as_ints(const SymSizes& sizes) { return C10_AS_INTARRAYREF_SLOW(sizes).vec(); }

}  // namespace

Parts::Parts(at::IntArrayRef shape, int64_t dim, std::vector<int64_t> sizes)
    : shape_(shape), dim_(dim), sizes_(std::move(sizes)) {
  shape_[dim_] = 1;
  numel_per_slice_ = c10::multiply_integers(shape_);
}

Parts Parts::of_full(at::IntArrayRef shape, int64_t dim, at::OptionalIntArrayRef split_sizes,
                     const c10d::ProcessGroup& group, const char* op) {
  return {shape, dim, as_ints(sizes_of_parts(shape[dim], dim, as_symints(split_sizes), group, op))};
}

Parts Parts::of_shard(at::IntArrayRef shape, int64_t dim, at::OptionalIntArrayRef split_sizes,
                      const c10d::ProcessGroup& group, const char* op) {
  return {shape, dim, as_ints(sizes_of_shards(shape[dim], dim, as_symints(split_sizes), group, op))};
}

bool Parts::are_equal() const {
  return std::ranges::adjacent_find(sizes_, std::not_equal_to<>()) == sizes_.end();
}

at::DimVector Parts::full_shape() const {
  auto shape = shape_;
  shape[dim_] = c10::sum_integers(sizes_);
  return shape;
}

at::DimVector Parts::shape(int64_t rank) const {
  auto shape = shape_;
  shape[dim_] = sizes_[rank];
  return shape;
}

int64_t Parts::max_numel() const { return *std::ranges::max_element(sizes_) * numel_per_slice_; }

int64_t Parts::full_numel() const { return c10::multiply_integers(full_shape()); }

std::vector<int64_t> Parts::numels() const {
  std::vector<int64_t> numels(sizes_);
  for (auto& numel : numels) {
    numel *= numel_per_slice_;
  }
  return numels;
}

at::Tensor Parts::of(const at::Tensor& full, int64_t rank) const {
  const auto begin = c10::sum_integers(sizes_.begin(), sizes_.begin() + rank);
  return full.narrow(dim_, begin, sizes_[rank]);
}

bool Parts::lie_in_order() const { return is_rank_major(shape_, dim_); }

template <typename Visit>
void Parts::visit_parts(const at::Tensor& flat, int64_t stride, const at::Tensor& full,
                        const Visit& visit) const {
  int64_t begin = 0;
  for (int64_t rank = 0; rank < num_parts(); ++rank) {
    visit(flat.narrow(0, begin, numel(rank)).view(shape(rank)), of(full, rank));
    begin += stride == 0 ? numel(rank) : stride;
  }
}

at::Tensor Parts::pack(const at::Tensor& full) const {
  if (lie_in_order()) {
    return private_input(full).view(-1);
  }
  if (are_equal()) {
    return split_shards(full, num_parts(), dim_).view(-1);
  }
  auto flat = fresh_tensor(full_numel(), full);
  visit_parts(flat, 0, full, [](const auto& flat_part, const auto& part) { flat_part.copy_(part); });
  return flat;
}

at::Tensor Parts::pack_padded(const at::Tensor& full) const {
  auto flat = at::zeros(num_parts() * max_numel(), full.options());
  visit_parts(flat, max_numel(), full,
              [](const auto& flat_part, const auto& part) { flat_part.copy_(part); });
  return flat;
}

void Parts::unpack(const at::Tensor& flat, int64_t stride, const at::Tensor& full) const {
  visit_parts(flat, stride, full, [](const auto& flat_part, const auto& part) { part.copy_(flat_part); });
}

}  // namespace funcol
