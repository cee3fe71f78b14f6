#include "ops/shard_geometry.h"

#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "ops/backend_tensor.h"
#include "ops/layout_change.h"
#include "ops/split_sizes.h"

namespace funcol {
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

Parts Parts::of_whole(at::IntArrayRef shape, int64_t dim, at::OptionalIntArrayRef split_sizes,
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

int64_t Parts::max_numel() const { return *std::ranges::max_element(sizes_) * numel_per_slice_; }

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
    return private_input(whole).view(-1);
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
