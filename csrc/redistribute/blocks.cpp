#include "redistribute/blocks.h"

#include <algorithm>
#include <ranges>
#include <stdexcept>

#include "layout/tensor_meta.h"

namespace funcol {
namespace {

// Calls visit(begin, size, position in a, position in b) for every run of indices that both have, ascending.
template <typename Visit>
void for_each_common_run(const Intervals& a, const Intervals& b, const Visit& visit) {
  size_t i = 0;
  size_t j = 0;
  int64_t before_a = 0;
  int64_t before_b = 0;
  while (i < a.size() && j < b.size()) {
    const int64_t begin = std::max(a[i].begin, b[j].begin);
    const int64_t end = std::min(a[i].end(), b[j].end());
    if (begin < end) {
      visit(begin, end - begin, before_a + begin - a[i].begin, before_b + begin - b[j].begin);
    }
    if (a[i].end() <= b[j].end()) {
      before_a += a[i++].size;
    } else {
      before_b += b[j++].size;
    }
  }
}

using IndicesByDim = std::vector<Intervals>;

IndicesByDim indices_by_dim(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                            const Coordinate& coordinate) {
  IndicesByDim held;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    held.push_back(local_indices(layout, mesh, static_cast<int64_t>(dim), shape[dim], coordinate));
  }
  return held;
}

std::vector<int64_t> shape_of(const IndicesByDim& held) {
  std::vector<int64_t> shape;
  for (const auto& intervals : held) {
    shape.push_back(num_indices(intervals));
  }
  return shape;
}

// The group's axes that cut each dim.
std::vector<std::vector<int64_t>> cutting_axes(const Layout& layout, AxisSet axes, size_t num_dims) {
  std::vector<std::vector<int64_t>> cutting(num_dims);
  for (size_t dim = 0; dim < num_dims; ++dim) {
    for (const int64_t axis : layout.axes_of(static_cast<int64_t>(dim))) {
      if (contains(axes, axis)) {
        cutting[dim].push_back(axis);
      }
    }
  }
  return cutting;
}

// Sets the coordinate on `axes` to the `cut`-th of all they can have.
void set_cut(Coordinate& coordinate, const Mesh& mesh, const std::vector<int64_t>& axes, int64_t cut) {
  for (const auto axis : std::views::reverse(axes)) {
    coordinate[axis] = cut % mesh.sizes[axis];
    cut /= mesh.sizes[axis];
  }
}

bool agree_on(const Coordinate& a, const Coordinate& b, const std::vector<int64_t>& axes) {
  return std::ranges::all_of(axes, [&](int64_t axis) { return a[axis] == b[axis]; });
}

// How the cuts of dim `dim` make up what the rank wants of it.
std::vector<Piece> pieces_of(const Mesh& mesh, const Layout& before, int64_t dim, int64_t size,
                             const Intervals& wanted, const std::vector<int64_t>& axes, int64_t num_cuts,
                             Coordinate coordinate) {
  struct Placed {
    int64_t position;
    Piece piece;
  };
  std::vector<Placed> placed;
  for (int64_t cut = 0; cut < num_cuts; ++cut) {
    set_cut(coordinate, mesh, axes, cut);
    const auto held = local_indices(before, mesh, dim, size, coordinate);
    const auto places = positions(held, wanted);
    const int64_t in_block = num_indices(places);
    int64_t seen = 0;
    for (const auto& place : places) {
      placed.push_back({place.begin, {cut, {seen, place.size}, place.size == in_block}});
      seen += place.size;
    }
  }
  std::ranges::sort(placed, [](const Placed& a, const Placed& b) { return a.position < b.position; });
  std::vector<Piece> pieces;
  pieces.reserve(placed.size());
  for (const auto& [position, piece] : placed) {
    pieces.push_back(piece);
  }
  return pieces;
}

}  // namespace

Intervals positions(const Intervals& wanted, const Intervals& held) {
  Intervals found;
  for_each_common_run(wanted, held,
                      [&](int64_t /*begin*/, int64_t size, int64_t /*in_wanted*/, int64_t in_held) {
                        append(found, {in_held, size});
                      });
  return found;
}

Intervals intersection(const Intervals& a, const Intervals& b) {
  Intervals found;
  for_each_common_run(a, b, [&](int64_t begin, int64_t size, int64_t /*in_a*/, int64_t /*in_b*/) {
    append(found, {begin, size});
  });
  return found;
}

void select_dim(int64_t dim, const Intervals& wanted, const Intervals& held, Selection& selection) {
  if (wanted != held) {
    selection.push_back({dim, positions(wanted, held)});
  }
}

int64_t Exchange::source(const std::vector<int64_t>& cuts) const {
  int64_t place = 0;
  for (size_t dim = 0; dim < cuts.size(); ++dim) {
    place = place * num_cuts[dim] + cuts[dim];
  }
  return sources[place];
}

Exchange plan_exchange(const Mesh& mesh, const Layout& before, const Layout& after,
                       const std::vector<int64_t>& shape, const GroupRanks& ranks) {
  std::vector<int64_t> replicating;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (!contains(ranks.axes(), axis) || mesh.sizes[axis] == 1) {
      continue;
    }
    if (before.placements[axis].is_partial() || after.placements[axis].is_partial()) {
      throw std::logic_error("plan_exchange: partial values cannot be exchanged, from " + to_string(before) +
                             " to " + to_string(after));
    }
    if (before.placements[axis].is_replicate()) {
      replicating.push_back(axis);
    }
  }
  const auto held = indices_by_dim(before, mesh, shape, ranks.own());
  const auto wanted = indices_by_dim(after, mesh, shape, ranks.own());
  Exchange exchange;
  exchange.shape_before = shape_of(held);
  exchange.shape_after = shape_of(wanted);

  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& other = ranks.coordinate(rank);
    const bool talks = agree_on(ranks.own(), other, replicating);
    Exchange::Sent sent;
    Exchange::Received received;
    std::vector<int64_t> sent_shape;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      const auto index = static_cast<int64_t>(dim);
      const auto to_send = intersection(held[dim], local_indices(after, mesh, index, shape[dim], other));
      const auto to_get = intersection(wanted[dim], local_indices(before, mesh, index, shape[dim], other));
      select_dim(index, to_send, held[dim], sent.selection);
      sent_shape.push_back(num_indices(to_send));
      received.shape.push_back(num_indices(to_get));
    }
    sent.numel = talks ? num_elements(sent_shape) : 0;
    received.numel = talks ? num_elements(received.shape) : 0;
    exchange.sent.push_back(std::move(sent));
    exchange.received.push_back(std::move(received));
  }

  const auto axes = cutting_axes(before, ranks.axes(), shape.size());
  int64_t num_blocks = 1;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    int64_t num_cuts = 1;
    for (const int64_t axis : axes[dim]) {
      num_cuts *= mesh.sizes[axis];
    }
    num_blocks *= num_cuts;
    exchange.num_cuts.push_back(num_cuts);
    exchange.pieces.push_back(pieces_of(mesh, before, static_cast<int64_t>(dim), shape[dim], wanted[dim],
                                        axes[dim], num_cuts, ranks.own()));
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    auto coordinate = ranks.own();
    int64_t rest = block;
    for (size_t dim = shape.size(); dim-- > 0;) {
      set_cut(coordinate, mesh, axes[dim], rest % exchange.num_cuts[dim]);
      rest /= exchange.num_cuts[dim];
    }
    exchange.sources.push_back(ranks.rank_of(coordinate));
  }
  return exchange;
}

}  // namespace funcol
