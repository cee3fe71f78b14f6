#include "transfer/exchange_plan.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace funcol {
namespace {

// Returns, by dim, the axes among `axes` that cut it.
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

// Sets the coordinate on `axes` to number `cut` of all coordinates on them.
void set_cut(Coordinate& coordinate, const Mesh& mesh, const std::vector<int64_t>& axes, int64_t cut) {
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    coordinate[*axis] = cut % mesh.sizes[*axis];
    cut /= mesh.sizes[*axis];
  }
}

bool agree_on(const Coordinate& a, const Coordinate& b, const std::vector<int64_t>& axes) {
  return std::ranges::all_of(axes, [&](int64_t axis) { return a[axis] == b[axis]; });
}

// Returns the axes of a group on which its ranks hold the same block before an exchange.
std::vector<int64_t> replicating_axes(const Mesh& mesh, const Layout& before, const Layout& after,
                                      AxisSet axes) {
  std::vector<int64_t> replicating;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (!contains(axes, axis) || mesh.sizes[axis] == 1) {
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
  return replicating;
}

// The indices of one rank before and after an exchange.
struct RankIndices {
  std::vector<Intervals> before;  // by dim
  std::vector<Intervals> after;
};

// Adds the blocks between this rank and another one, which are empty unless they `talk`.
void add_blocks(const RankIndices& own, const RankIndices& other, bool talk, Exchange& exchange) {
  auto& sent = exchange.sent.emplace_back();
  auto& received = exchange.received.emplace_back();
  sent.numel = received.numel = talk ? 1 : 0;
  for (size_t dim = 0; dim < own.before.size(); ++dim) {
    const auto to_send = common_indices(own.before[dim], other.after[dim]);
    select_dim(static_cast<int64_t>(dim), to_send, own.before[dim], sent.selection);
    sent.numel *= num_indices(to_send);
    received.shape.push_back(num_common(own.after[dim], other.before[dim]));
    received.numel *= received.shape.back();
  }
}

// Returns the pieces of the cuts of dim `dim` that make up the indices `wanted`.
std::vector<Piece> pieces_of(const Mesh& mesh, const Layout& before, int64_t dim, int64_t size,
                             const Intervals& wanted, const std::vector<int64_t>& axes, int64_t num_cuts,
                             Coordinate coordinate) {
  std::map<int64_t, Piece> by_position;
  for (int64_t cut = 0; cut < num_cuts; ++cut) {
    set_cut(coordinate, mesh, axes, cut);
    const auto places = positions(local_indices(before, mesh, dim, size, coordinate), wanted);
    const int64_t block_size = num_indices(places);
    int64_t seen = 0;
    for (const auto& place : places) {
      by_position[place.begin] = {cut, {seen, place.size}, place.size == block_size};
      seen += place.size;
    }
  }
  std::vector<Piece> pieces;
  for (const auto& [position, piece] : by_position) {
    pieces.push_back(piece);
  }
  return pieces;
}

}  // namespace

Intervals positions(const Intervals& wanted, const Intervals& held) {
  Intervals found;
  int64_t position = 0;  // of held[j]
  for (size_t i = 0, j = 0; i < wanted.size() && j < held.size();) {
    const int64_t begin = std::max(wanted[i].begin, held[j].begin);
    const int64_t end = std::min(wanted[i].end(), held[j].end());
    if (begin < end) {
      append(found, {position + begin - held[j].begin, end - begin});
    }
    if (wanted[i].end() <= held[j].end()) {
      ++i;
    } else {
      position += held[j++].size;
    }
  }
  return found;
}

void select_dim(int64_t dim, const Intervals& wanted, const Intervals& held, Selection& selection) {
  if (wanted != held) {
    selection.push_back({dim, positions(wanted, held)});
  }
}

std::vector<int64_t> Exchange::cuts_of(size_t block) const {
  std::vector<int64_t> cuts(num_cuts.size());
  auto rest = static_cast<int64_t>(block);
  for (size_t dim = cuts.size(); dim-- > 0;) {
    cuts[dim] = rest % num_cuts[dim];
    rest /= num_cuts[dim];
  }
  return cuts;
}

int64_t Exchange::source(const std::vector<int64_t>& cuts) const {
  int64_t block = 0;
  for (size_t dim = 0; dim < cuts.size(); ++dim) {
    block = block * num_cuts[dim] + cuts[dim];
  }
  return sources[block];
}

Exchange plan_exchange(const Mesh& mesh, const Layout& before, const Layout& after,
                       const std::vector<int64_t>& shape, const GroupRanks& ranks) {
  const auto replicating = replicating_axes(mesh, before, after, ranks.axes());
  const auto indices_of = [&](const Coordinate& coordinate) {
    return RankIndices{local_indices(before, mesh, shape, coordinate),
                       local_indices(after, mesh, shape, coordinate)};
  };
  const auto own = indices_of(ranks.own());
  Exchange exchange;
  exchange.shape_before = local_shape(before, mesh, shape, ranks.own());
  exchange.shape_after = local_shape(after, mesh, shape, ranks.own());
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& other = ranks.coordinate(rank);
    add_blocks(own, indices_of(other), agree_on(ranks.own(), other, replicating), exchange);
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
    exchange.pieces.push_back(pieces_of(mesh, before, static_cast<int64_t>(dim), shape[dim], own.after[dim],
                                        axes[dim], num_cuts, ranks.own()));
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    const auto cuts = exchange.cuts_of(block);
    auto coordinate = ranks.own();
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      set_cut(coordinate, mesh, axes[dim], cuts[dim]);
    }
    exchange.sources.push_back(ranks.rank_of(coordinate));
  }
  return exchange;
}

}  // namespace funcol
