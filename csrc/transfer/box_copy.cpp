#include "transfer/box_copy.h"

#include <ATen/ops/as_strided.h>

#include <cstring>
#include <numeric>
#include <utility>

#include "layout/tensor_meta.h"

namespace funcol {
namespace {

bool is_full(const std::vector<CopyRun>& runs, int64_t from_size, int64_t to_size) {
  return runs.size() == 1 && runs[0] == CopyRun{0, 0, from_size} && from_size == to_size;
}

int64_t size_of(const std::vector<CopyRun>& runs) {
  return std::accumulate(runs.begin(), runs.end(), int64_t{0},
                         [](int64_t sum, const CopyRun& run) { return sum + run.size; });
}

// Calls copy(from, to, sizes) for each product of a run per dim.
template <typename Copy>
void for_each_box(const std::vector<std::vector<CopyRun>>& runs, const std::vector<int64_t>& from_strides,
                  const std::vector<int64_t>& to_strides, int64_t from, int64_t to,
                  std::vector<int64_t>& sizes, const Copy& copy) {
  const size_t dim = sizes.size();
  if (dim == runs.size()) {
    copy(from, to, sizes);
    return;
  }
  for (const auto& run : runs[dim]) {
    sizes.push_back(run.size);
    for_each_box(runs, from_strides, to_strides, from + run.from * from_strides[dim],
                 to + run.to * to_strides[dim], sizes, copy);
    sizes.pop_back();
  }
}

// A box on the CPU: rows of the innermost dim.
struct BoxRows {
  const std::vector<int64_t>& sizes;
  const std::vector<int64_t>& from_strides;
  const std::vector<int64_t>& to_strides;
  int64_t itemsize;

  void copy(size_t dim, const char* from, char* to) const {
    if (dim + 1 >= sizes.size()) {
      std::memcpy(to, from, (sizes.empty() ? 1 : sizes[dim]) * itemsize);
      return;
    }
    for (int64_t index = 0; index < sizes[dim]; ++index) {
      copy(dim + 1, from + index * from_strides[dim] * itemsize, to + index * to_strides[dim] * itemsize);
    }
  }
};

}  // namespace

BoxCopy::BoxCopy(std::vector<std::vector<CopyRun>> runs, const std::vector<int64_t>& from_shape,
                 const std::vector<int64_t>& to_shape) {
  std::vector<int64_t> from_sizes;
  std::vector<int64_t> to_sizes;
  for (size_t dim = 0; dim < runs.size(); ++dim) {
    const int64_t size = size_of(runs[dim]);
    numel_ *= size;
    if (dim > 0 && is_full(runs[dim], from_shape[dim], to_shape[dim])) {
      // Makes the rows of the dim before `size` times as long.
      for (auto& run : runs_.back()) {
        run = {run.from * size, run.to * size, run.size * size};
      }
      from_sizes.back() *= size;
      to_sizes.back() *= size;
    } else {
      runs_.push_back(std::move(runs[dim]));
      from_sizes.push_back(from_shape[dim]);
      to_sizes.push_back(to_shape[dim]);
    }
  }
  from_strides_ = contiguous_strides(from_sizes);
  to_strides_ = contiguous_strides(to_sizes);
}

int64_t BoxCopy::place() const {
  const bool is_one_run = runs_.size() == 1 && runs_[0].size() == 1 && runs_[0][0].from == 0;
  return is_one_run ? runs_[0][0].to : -1;
}

void BoxCopy::run(const at::Tensor& from, int64_t from_begin, const at::Tensor& to, int64_t to_begin) const {
  if (numel_ == 0) {
    return;
  }
  if (!from.is_cpu()) {
    return run_by_operators(from, from_begin, to, to_begin);
  }
  if (runs_.size() == 1 && runs_[0].size() == 1) {
    const auto itemsize = static_cast<int64_t>(from.itemsize());
    const auto& run = runs_[0][0];
    std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + (to_begin + run.to) * itemsize,
                static_cast<const char*>(from.const_data_ptr()) + (from_begin + run.from) * itemsize,
                run.size * itemsize);
    return;
  }
  std::vector<int64_t> sizes;
  sizes.reserve(runs_.size());
  const auto itemsize = static_cast<int64_t>(from.itemsize());
  const auto* source = static_cast<const char*>(from.const_data_ptr()) + from_begin * itemsize;
  auto* target = static_cast<char*>(to.mutable_data_ptr()) + to_begin * itemsize;
  for_each_box(runs_, from_strides_, to_strides_, 0, 0, sizes,
               [&](int64_t from_offset, int64_t to_offset, const std::vector<int64_t>& box) {
                 BoxRows{box, from_strides_, to_strides_, itemsize}.copy(0, source + from_offset * itemsize,
                                                                         target + to_offset * itemsize);
               });
}

void BoxCopy::for_each_rows(const char* from, char* to, int64_t itemsize,
                            const std::function<void(const kernels::RowBox&)>& take) const {
  if (numel_ == 0) {
    return;
  }
  std::vector<int64_t> sizes;
  for_each_box(runs_, from_strides_, to_strides_, 0, 0, sizes,
               [&](int64_t from_offset, int64_t to_offset, const std::vector<int64_t>& box) {
                 kernels::RowBox rows{from + from_offset * itemsize, to + to_offset * itemsize,
                                      (box.empty() ? 1 : box.back()) * itemsize};
                 for (size_t dim = 0; dim + 1 < box.size(); ++dim) {
                   const size_t outer = dim + 3 - box.size();
                   rows.num_rows[outer] = box[dim];
                   rows.from_strides[outer] = from_strides_[dim] * itemsize;
                   rows.to_strides[outer] = to_strides_[dim] * itemsize;
                 }
                 if (rows.num_bytes() > 0) {
                   take(rows);
                 }
               });
}

void BoxCopy::run_by_operators(const at::Tensor& from, int64_t from_begin, const at::Tensor& to,
                               int64_t to_begin) const {
  if (numel_ == 0) {
    return;
  }
  std::vector<int64_t> sizes;
  for_each_box(runs_, from_strides_, to_strides_, from.storage_offset() + from_begin,
               to.storage_offset() + to_begin, sizes,
               [&](int64_t from_offset, int64_t to_offset, const std::vector<int64_t>& box) {
                 at::as_strided(to, box, to_strides_, to_offset)
                     .copy_(at::as_strided(from, box, from_strides_, from_offset));
               });
}

std::vector<std::vector<CopyRun>> full_runs(const std::vector<int64_t>& shape) {
  std::vector<std::vector<CopyRun>> runs;
  runs.reserve(shape.size());
  for (const int64_t size : shape) {
    runs.push_back({{0, 0, size}});
  }
  return runs;
}

std::vector<CopyRun> runs_to_shard(const Intervals& positions) {
  std::vector<CopyRun> runs;
  int64_t filled = 0;
  for (const auto& interval : positions) {
    runs.push_back({interval.begin, filled, interval.size});
    filled += interval.size;
  }
  return runs;
}

BoxCopy selection_copy(const Selection& selection, const std::vector<int64_t>& shape) {
  auto runs = full_runs(shape);
  auto selected = shape;
  for (const auto& [dim, positions] : selection) {
    runs[dim] = runs_to_shard(positions);
    selected[dim] = num_indices(positions);
  }
  return {std::move(runs), shape, selected};
}

}  // namespace funcol
