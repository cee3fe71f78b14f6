#include "transfer/exchange_plan.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace funcol {
namespace {

// The cuts that the axes of a group make of a dim, numbered along the last axis first, and their indices.
class DimCuts {
 public:
  DimCuts(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size, const GroupRanks& ranks)
      : mesh_(mesh) {
    int64_t num_cuts = 1;
    for (const int64_t axis : layout.axes_of(dim)) {
      if (contains(ranks.axes(), axis)) {
        axes_.push_back(axis);
        num_cuts *= mesh.sizes[axis];
      }
    }
    auto coordinate = ranks.own();
    for (int64_t cut = 0; cut < num_cuts; ++cut) {
      move_to(cut, coordinate);
      indices_.push_back(local_indices(layout, mesh, dim, size, coordinate));
    }
  }

  // Returns the indices of each cut.
  const std::vector<Intervals>& indices() const { return indices_; }

  // Returns the indices that the rank at `coordinate` holds.
  const Intervals& at(const Coordinate& coordinate) const {
    int64_t cut = 0;
    for (const int64_t axis : axes_) {
      cut = cut * mesh_.sizes[axis] + coordinate[axis];
    }
    return indices_[cut];
  }

  // Sets the coordinate on the cutting axes to that of `cut`.
  void move_to(int64_t cut, Coordinate& coordinate) const {
    for (auto axis = axes_.rbegin(); axis != axes_.rend(); ++axis) {
      coordinate[*axis] = cut % mesh_.sizes[*axis];
      cut /= mesh_.sizes[*axis];
    }
  }

 private:
  const Mesh& mesh_;
  std::vector<int64_t> axes_;
  std::vector<Intervals> indices_;
};

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

// Returns the pieces of the cuts that make up the indices `wanted`.
std::vector<Piece> pieces_of(const std::vector<Intervals>& cuts, const Intervals& wanted) {
  std::map<int64_t, Piece> by_position;
  for (size_t cut = 0; cut < cuts.size(); ++cut) {
    const auto places = positions(cuts[cut], wanted);
    const int64_t block_size = num_indices(places);
    int64_t seen = 0;
    for (const auto& place : places) {
      by_position[place.begin] = {static_cast<int64_t>(cut), {seen, place.size}, place.size == block_size};
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
  const auto& own = ranks.own();
  Exchange exchange;
  std::vector<DimCuts> cuts_before;
  std::vector<DimCuts> cuts_after;
  cuts_before.reserve(shape.size());
  cuts_after.reserve(shape.size());
  int64_t num_blocks = 1;
  for (int64_t dim = 0; dim < std::ssize(shape); ++dim) {
    const auto& held = cuts_before.emplace_back(before, mesh, dim, shape[dim], ranks);
    const auto& wanted = cuts_after.emplace_back(after, mesh, dim, shape[dim], ranks).at(own);
    exchange.shape_before.push_back(num_indices(held.at(own)));
    exchange.shape_after.push_back(num_indices(wanted));
    exchange.num_cuts.push_back(std::ssize(held.indices()));
    exchange.pieces.push_back(pieces_of(held.indices(), wanted));
    num_blocks *= exchange.num_cuts.back();
  }
  exchange.sent.reserve(ranks.size());
  exchange.received.reserve(ranks.size());
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& other = ranks.coordinate(rank);
    auto& sent = exchange.sent.emplace_back();
    auto& received = exchange.received.emplace_back();
    sent.numel = received.numel = agree_on(own, other, replicating) ? 1 : 0;
    received.shape.reserve(shape.size());
    for (int64_t dim = 0; dim < std::ssize(shape); ++dim) {
      const auto& held = cuts_before[dim];
      const auto& wanted = cuts_after[dim];
      const auto to_send = common_indices(held.at(own), wanted.at(other));
      select_dim(dim, to_send, held.at(own), sent.selection);
      sent.numel *= num_indices(to_send);
      received.shape.push_back(num_common(wanted.at(own), held.at(other)));
      received.numel *= received.shape.back();
    }
  }
  exchange.sources.reserve(num_blocks);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const auto cuts = exchange.cuts_of(block);
    auto coordinate = own;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      cuts_before[dim].move_to(cuts[dim], coordinate);
    }
    exchange.sources.push_back(ranks.rank_of(coordinate));
  }
  return exchange;
}

}  // namespace funcol
