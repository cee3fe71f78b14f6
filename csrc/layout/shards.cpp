#include "layout/shards.h"

#include <algorithm>

namespace funcol {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Returns the lengths of shares, among them the shortest, if each of `lengths` is cut for `num_ranks` ranks.
std::vector<int64_t> chunk_lengths(const std::vector<int64_t>& lengths, int64_t num_ranks,
                                   int64_t split_factor) {
  std::vector<int64_t> chunks;
  const auto add = [&chunks](int64_t length) {
    if (std::ranges::find(chunks, length) == chunks.end()) {
      chunks.push_back(length);
    }
  };
  for (const int64_t length : lengths) {
    if (split_factor == 1) {
      const int64_t longest = longest_shard(length, num_ranks);
      add(longest);
      add(std::max<int64_t>(length - (num_ranks - 1) * longest, 0));
      continue;
    }
    for (int64_t index = 0; index < num_ranks; ++index) {
      add(num_indices(cut({{0, length}}, num_ranks, index, split_factor)));
    }
  }
  return chunks;
}

// Calls visit(interval) for the longest intervals that lie in one of `a` and in one of `b`.
template <typename Visit>
void for_each_common(const Intervals& a, const Intervals& b, const Visit& visit) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const int64_t begin = std::max(a[i].begin, b[j].begin);
    const int64_t end = std::min(a[i].end(), b[j].end());
    if (begin < end) {
      visit(Interval{begin, end - begin});
    }
    (a[i].end() == end ? i : j) += 1;
  }
}

}  // namespace

void append(Intervals& intervals, const Interval& next) {
  if (next.size == 0) {
    return;
  }
  if (!intervals.empty() && intervals.back().end() == next.begin) {
    intervals.back().size += next.size;
  } else {
    intervals.push_back(next);
  }
}

int64_t num_indices(const Intervals& intervals) {
  int64_t sum = 0;
  for (const auto& interval : intervals) {
    sum += interval.size;
  }
  return sum;
}

Intervals common_indices(const Intervals& a, const Intervals& b) {
  Intervals common;
  for_each_common(a, b, [&](const Interval& interval) { append(common, interval); });
  return common;
}

int64_t num_common(const Intervals& a, const Intervals& b) {
  int64_t sum = 0;
  for_each_common(a, b, [&](const Interval& interval) { sum += interval.size; });
  return sum;
}

void append_range(const Intervals& indices, int64_t begin, int64_t end, Intervals& out) {
  int64_t seen = 0;
  for (const auto& interval : indices) {
    const int64_t from = std::max<int64_t>(begin - seen, 0);
    const int64_t to = std::min(end - seen, interval.size);
    if (from < to) {
      append(out, {interval.begin + from, to - from});
    }
    seen += interval.size;
  }
}

Intervals cut(const Intervals& indices, int64_t num_ranks, int64_t index, int64_t split_factor) {
  const int64_t size = num_indices(indices);
  const int64_t piece = ceil_div(size, split_factor);
  Intervals out;
  for (int64_t begin = 0; begin < size; begin += piece) {
    const int64_t end = std::min(begin + piece, size);
    const int64_t chunk = ceil_div(end - begin, num_ranks);
    append_range(indices, std::min(begin + index * chunk, end), std::min(begin + (index + 1) * chunk, end),
                 out);
  }
  return out;
}

Intervals local_indices(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size,
                        const Coordinate& coordinate) {
  Intervals held;
  if (size > 0) {
    held.push_back({0, size});
  }
  for (const int64_t axis : layout.axes_of(dim)) {
    held = cut(held, mesh.sizes[axis], coordinate[axis], layout.placements[axis].split_factor);
  }
  return held;
}

std::vector<Intervals> local_indices(const Layout& layout, const Mesh& mesh,
                                     const std::vector<int64_t>& shape, const Coordinate& coordinate) {
  std::vector<Intervals> indices(shape.size());
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    indices[dim] = local_indices(layout, mesh, static_cast<int64_t>(dim), shape[dim], coordinate);
  }
  return indices;
}

std::vector<int64_t> local_shape(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                                 const Coordinate& coordinate) {
  std::vector<int64_t> local(shape.size());
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    local[dim] = num_indices(local_indices(layout, mesh, static_cast<int64_t>(dim), shape[dim], coordinate));
  }
  return local;
}

bool is_cut_evenly(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size) {
  int64_t num_pieces = 1;
  for (const int64_t axis : layout.axes_of(dim)) {
    for (const int64_t factor : {mesh.sizes[axis], layout.placements[axis].split_factor}) {
      if (factor > size / num_pieces) {
        return size == 0;  // more pieces than indices; their number may not fit 64 bits
      }
      num_pieces *= factor;
    }
  }
  return size % num_pieces == 0;
}

bool leaves_none_empty(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size) {
  const auto& axes = layout.axes_of(dim);
  std::vector<int64_t> lengths{size};
  for (const int64_t axis : axes) {
    lengths = chunk_lengths(lengths, mesh.sizes[axis], layout.placements[axis].split_factor);
  }
  return axes.empty() || std::ranges::min(lengths) > 0;
}

int64_t longest_shard(int64_t size, int64_t num_ranks, int64_t split_factor) {
  if (split_factor == 1 || size == 0) {
    return ceil_div(size, num_ranks);
  }
  const int64_t piece = ceil_div(size, split_factor);
  return size / piece * ceil_div(piece, num_ranks) + ceil_div(size % piece, num_ranks);
}

bool for_all_coordinates(const Mesh& mesh, const std::vector<int64_t>& axes,
                         const std::function<bool(const Coordinate&)>& visit) {
  Coordinate coordinate(mesh.sizes.size(), 0);
  while (true) {
    if (!visit(coordinate)) {
      return false;
    }
    size_t place = axes.size();
    while (place > 0 && ++coordinate[axes[place - 1]] == mesh.sizes[axes[place - 1]]) {
      coordinate[axes[--place]] = 0;
    }
    if (place == 0) {
      return true;
    }
  }
}

}  // namespace funcol
