#include "ops/parts.h"

#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "ops/layout_change.h"
#include "ops/wire.h"

namespace funcol {
namespace {

std::vector<int64_t> checked_sizes(at::IntArrayRef split_sizes, const c10d::ProcessGroup& group,
                                   const char* op) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(split_sizes.size()) == group.getSize(), "funcol::", op,
                    ": split_sizes has ", split_sizes.size(), " entries, but group '", group_name(group),
                    "' has ", group.getSize(), " ranks. Pass one size per rank.");
  TORCH_CHECK_VALUE(std::all_of(split_sizes.begin(), split_sizes.end(), [](auto size) { return size >= 0; }),
                    "funcol::", op, ": split_sizes is ", split_sizes, ". Sizes must not be negative.");
  return split_sizes.vec();
}

}  // namespace

Parts::Parts(at::IntArrayRef shape, int64_t dim, std::vector<int64_t> sizes)
    : shape_(shape), dim_(dim), sizes_(std::move(sizes)) {
  shape_[dim_] = 1;
  numel_per_slice_ = c10::multiply_integers(shape_);
}

Parts Parts::of_whole(at::IntArrayRef shape, int64_t dim, at::OptionalIntArrayRef split_sizes,
                      const c10d::ProcessGroup& group, const char* op) {
  if (!split_sizes.has_value()) {
    TORCH_CHECK_VALUE(shape[dim] % group.getSize() == 0, "funcol::", op, ": dim ", dim, " has size ",
                      shape[dim], ", not divisible by the ", group.getSize(), " ranks of group '",
                      group_name(group), "'. Pad it, use another dim, or pass split_sizes.");
    return {shape, dim, std::vector<int64_t>(group.getSize(), shape[dim] / group.getSize())};
  }
  auto sizes = checked_sizes(*split_sizes, group, op);
  const auto total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  TORCH_CHECK_VALUE(total == shape[dim], "funcol::", op, ": split_sizes ", *split_sizes, " sum up to ", total,
                    ", but dim ", dim, " has size ", shape[dim], ". They must be equal.");
  return {shape, dim, std::move(sizes)};
}

Parts Parts::of_shard(at::IntArrayRef shape, int64_t dim, at::OptionalIntArrayRef split_sizes,
                      const c10d::ProcessGroup& group, const char* op) {
  if (!split_sizes.has_value()) {
    return {shape, dim, std::vector<int64_t>(group.getSize(), shape[dim])};
  }
  auto sizes = checked_sizes(*split_sizes, group, op);
  TORCH_CHECK_VALUE(sizes[group.getRank()] == shape[dim], "funcol::", op, ": split_sizes is ", *split_sizes,
                    ", but dim ", dim, " has size ", shape[dim], " on rank ", group.getRank(),
                    ". Pass the same list on all ranks, with each rank's own size at its place.");
  return {shape, dim, std::move(sizes)};
}

bool Parts::are_equal() const {
  return std::adjacent_find(sizes_.begin(), sizes_.end(), std::not_equal_to<>()) == sizes_.end();
}

at::DimVector Parts::whole_shape() const {
  auto shape = shape_;
  shape[dim_] = std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
  return shape;
}

at::DimVector Parts::shape(int64_t rank) const {
  auto shape = shape_;
  shape[dim_] = sizes_[rank];
  return shape;
}

int64_t Parts::max_numel() const { return *std::max_element(sizes_.begin(), sizes_.end()) * numel_per_slice_; }

int64_t Parts::whole_numel() const { return c10::multiply_integers(whole_shape()); }

std::vector<int64_t> Parts::numels() const {
  std::vector<int64_t> numels(sizes_);
  for (auto& numel : numels) {
    numel *= numel_per_slice_;
  }
  return numels;
}

at::Tensor Parts::of(const at::Tensor& whole, int64_t rank) const {
  const auto begin = std::accumulate(sizes_.begin(), sizes_.begin() + rank, int64_t{0});
  return whole.narrow(dim_, begin, sizes_[rank]);
}

bool Parts::lie_in_order() const { return is_rank_major(shape_, dim_); }

at::Tensor Parts::pack(const at::Tensor& whole) const {
  if (lie_in_order()) {
    return contiguous_input(whole).view(-1);
  }
  if (are_equal()) {
    return split_shards(whole, num_parts(), dim_).view(-1);
  }
  auto flat = fresh_tensor(whole_numel(), whole);
  int64_t begin = 0;
  for (int64_t rank = 0; rank < num_parts(); ++rank) {
    flat.narrow(0, begin, numel(rank)).view(shape(rank)).copy_(of(whole, rank));
    begin += numel(rank);
  }
  return flat;
}

at::Tensor Parts::pack_padded(const at::Tensor& whole) const {
  auto flat = at::zeros(num_parts() * max_numel(), whole.options());
  for (int64_t rank = 0; rank < num_parts(); ++rank) {
    flat.narrow(0, rank * max_numel(), numel(rank)).view(shape(rank)).copy_(of(whole, rank));
  }
  return flat;
}

void Parts::unpack(const at::Tensor& flat, int64_t stride, const at::Tensor& whole) const {
  int64_t begin = 0;
  for (int64_t rank = 0; rank < num_parts(); ++rank) {
    of(whole, rank).copy_(flat.narrow(0, begin, numel(rank)).view(shape(rank)));
    begin += stride == 0 ? numel(rank) : stride;
  }
}

}  // namespace funcol
