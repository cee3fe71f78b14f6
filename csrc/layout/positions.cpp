#include "layout/positions.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace funcol {

Positions::Positions(const std::vector<int64_t>& shape, const std::vector<ShardCut>& cuts) {
  std::vector<Intervals> held(shape.size());
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    append(held[dim], {0, shape[dim]});
  }
  int64_t last = 0;  // dim that is cut; dim 0 if none is
  for (const auto& one : cuts) {
    held[one.dim] = cut(held[one.dim], one.num_ranks, one.index, one.split_factor);
    last = std::max(last, one.dim);
  }
  int64_t stride = 1;
  int64_t dim = static_cast<int64_t>(shape.size()) - 1;
  for (; dim > last; --dim) {
    stride *= shape[dim];
  }
  if (shape.empty()) {
    in_row_.push_back({0, 0, 1});
    return;
  }
  row_size_ = 0;
  for (const auto& [begin, size] : held[dim]) {
    in_row_.push_back({row_size_, begin * stride, size * stride});
    row_size_ += size * stride;
  }
  for (stride *= shape[dim]; --dim >= 0; stride *= shape[dim]) {
    outer_.push_back({held[dim], num_indices(held[dim]), stride});
    num_rows_ *= outer_.back().size;
  }
}

std::vector<PositionRun> Positions::runs(int64_t begin, int64_t end) const {
  std::vector<PositionRun> runs;
  while (begin < end) {
    const int64_t row = begin / row_size_;
    const int64_t in_full = begin_of_row(row);
    const int64_t end_in_row = std::min(end - row * row_size_, row_size_);
    for (const auto& run : in_row_) {
      const int64_t from = std::max(begin - row * row_size_, run.local);
      const int64_t to = std::min(end_in_row, run.local + run.size);
      if (from < to) {
        runs.push_back({row * row_size_ + from, in_full + run.full + from - run.local, to - from});
      }
    }
    begin = row * row_size_ + end_in_row;
  }
  return runs;
}

std::vector<PositionBox> Positions::boxes() const {
  std::vector<PositionBox> boxes;
  boxes.reserve(in_row_.size());
  for (const auto& run : in_row_) {
    boxes.push_back({run.local, run.full, {{run.size, 1, 1}}});  // the last dim first until the end
  }
  int64_t local_stride = row_size_;
  for (const auto& [held, size, stride] : outer_) {
    std::vector<PositionBox> next;
    int64_t before = 0;
    for (const auto& interval : held) {
      for (auto box : boxes) {
        box.local += before * local_stride;
        box.full += interval.begin * stride;
        auto& inner = box.dims.back();
        if (inner.size * inner.local_stride == local_stride && inner.size * inner.full_stride == stride) {
          inner.size *= interval.size;
        } else if (interval.size > 1) {
          box.dims.push_back({interval.size, local_stride, stride});
        }
        next.push_back(std::move(box));
      }
      before += interval.size;
    }
    boxes = std::move(next);
    local_stride *= size;
  }
  for (auto& box : boxes) {
    std::ranges::reverse(box.dims);
  }
  return boxes;
}

int64_t Positions::begin_of_row(int64_t row) const {
  int64_t begin = 0;
  for (const auto& dim : outer_) {
    int64_t index = row % dim.size;
    row /= dim.size;
    for (const auto& interval : dim.held) {
      if (index < interval.size) {
        begin += (interval.begin + index) * dim.stride;
        break;
      }
      index -= interval.size;
    }
  }
  return begin;
}

}  // namespace funcol
