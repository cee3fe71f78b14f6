#include "planner/transfer.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "layout/tensor_meta.h"

namespace funcol {
namespace {

void check_side(const char* side, const RankedMesh& mesh, const Layout& layout) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("plan_transfer: " + std::string(side) + why);
  };
  if (static_cast<int64_t>(mesh.ranks.size()) != mesh.mesh.num_ranks()) {
    refuse(" mesh has " + std::to_string(mesh.ranks.size()) + " ranks for " +
           std::to_string(mesh.mesh.num_ranks()) + " coordinates. Give one rank for each.");
  }
  auto ranks = mesh.ranks;
  std::ranges::sort(ranks);
  if (std::ranges::adjacent_find(ranks) != ranks.end()) {
    refuse(" mesh lists a rank twice. Give each coordinate a rank of its own.");
  }
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    if (layout.placements[axis].is_partial() && mesh.mesh.sizes[axis] > 1) {
      refuse(" layout " + to_string(layout) + " has partial values. Reduce them before.");
    }
  }
}

// The coordinate of the rank at `place` of a mesh.
Coordinate coordinate_at(const Mesh& mesh, int64_t place) {
  Coordinate coordinate(mesh.sizes.size());
  for (int64_t axis = mesh.num_axes() - 1; axis >= 0; --axis) {
    coordinate[axis] = place % mesh.sizes[axis];
    place /= mesh.sizes[axis];
  }
  return coordinate;
}

// How a layout cuts a tensor: by dim, which indices each cut has.
class Cuts {
 public:
  Cuts(const RankedMesh& mesh, const Layout& layout, const std::vector<int64_t>& shape) {
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      auto& of_dim = dims_.emplace_back();
      const auto& axes = layout.axes_of(static_cast<int64_t>(dim));
      for_all_coordinates(mesh.mesh, axes, [&](const Coordinate& at) {
        const int64_t cut = of_dim.num_cuts++;
        for (const auto& interval :
             local_indices(layout, mesh.mesh, static_cast<int64_t>(dim), shape[dim], at)) {
          of_dim.pieces.push_back({interval, cut});
        }
        return true;
      });
      std::ranges::sort(of_dim.pieces, {}, [](const Piece& piece) { return piece.indices.begin; });
    }
    find_blocks(mesh, layout);
  }

  struct Piece {
    Interval indices;
    int64_t cut;
  };
  // Of a dim, ascending. Together they are the whole dim.
  const std::vector<Piece>& pieces(size_t dim) const { return dims_[dim].pieces; }
  int64_t num_cuts(size_t dim) const { return dims_[dim].num_cuts; }
  // The ranks that hold a block, ascending. A block is a cut of each dim; blocks count up along the last dim
  // first.
  const std::vector<int64_t>& ranks_of(int64_t block) const { return ranks_[block]; }

 private:
  struct Dim {
    std::vector<Piece> pieces;
    int64_t num_cuts = 0;
  };

  void find_blocks(const RankedMesh& mesh, const Layout& layout) {
    int64_t num_blocks = 1;
    for (const auto& of_dim : dims_) {
      num_blocks *= of_dim.num_cuts;
    }
    ranks_.resize(num_blocks);
    for (size_t place = 0; place < mesh.ranks.size(); ++place) {
      const auto coordinate = coordinate_at(mesh.mesh, static_cast<int64_t>(place));
      int64_t block = 0;
      for (size_t dim = 0; dim < dims_.size(); ++dim) {
        int64_t cut = 0;
        for (const int64_t axis : layout.axes_of(static_cast<int64_t>(dim))) {
          cut = cut * mesh.mesh.sizes[axis] + coordinate[axis];
        }
        block = block * dims_[dim].num_cuts + cut;
      }
      ranks_[block].push_back(mesh.ranks[place]);
    }
    for (auto& ranks : ranks_) {
      std::ranges::sort(ranks);
    }
  }

  std::vector<Dim> dims_;
  std::vector<std::vector<int64_t>> ranks_;  // by block
};

// The indices of a dim that one cut before and one cut after have in common.
struct Common {
  int64_t src_cut = 0;
  int64_t dst_cut = 0;
  Intervals indices;
};

std::vector<Common> common_indices(const std::vector<Cuts::Piece>& src, const std::vector<Cuts::Piece>& dst) {
  std::vector<Common> all;
  std::map<std::pair<int64_t, int64_t>, size_t> places;
  size_t i = 0;
  size_t j = 0;
  while (i < src.size() && j < dst.size()) {
    const int64_t begin = std::max(src[i].indices.begin, dst[j].indices.begin);
    const int64_t end = std::min(src[i].indices.end(), dst[j].indices.end());
    const auto [place, is_new] = places.emplace(std::pair(src[i].cut, dst[j].cut), all.size());
    if (is_new) {
      all.push_back({src[i].cut, dst[j].cut, {}});
    }
    append(all[place->second].indices, {begin, end - begin});
    const bool ends_src = src[i].indices.end() == end;
    const bool ends_dst = dst[j].indices.end() == end;
    i += ends_src ? 1 : 0;
    j += ends_dst ? 1 : 0;
  }
  return all;
}

// What one rank asks of the holders of a block.
struct Request {
  int64_t receiver;
  size_t range;
  int64_t size;
};

// Shares requests among `holders`: each sends a stretch of them, which begins where that of the holder before
// ends. Requests come by receiver, so that a stretch has few receivers, and low ones for low holders.
void share(std::vector<Request> requests, const std::vector<int64_t>& holders,
           std::vector<TransferMessage>& messages) {
  std::ranges::stable_sort(requests, {}, &Request::receiver);
  int64_t total = 0;
  for (const auto& request : requests) {
    total += request.size;
  }
  const auto num_holders = static_cast<int64_t>(holders.size());
  // Not total * (place + 1) / num_holders, which may overflow.
  const auto end_of = [&](int64_t place) {
    return total / num_holders * (place + 1) + total % num_holders * (place + 1) / num_holders;
  };
  int64_t place = 0;
  int64_t sent = 0;
  for (const auto& request : requests) {
    for (int64_t begin = 0; begin < request.size;) {
      while (end_of(place) == sent) {
        ++place;
      }
      const int64_t size = std::min(request.size - begin, end_of(place) - sent);
      messages.push_back({holders[place], request.receiver, request.range, begin, size});
      begin += size;
      sent += size;
    }
  }
}

// Visits all ranges: products of indices that cuts have in common, one a dim.
class Ranges {
 public:
  Ranges(const Cuts& src, const Cuts& dst, size_t num_dims) : src_(src), dst_(dst), chosen_(num_dims) {
    for (size_t dim = 0; dim < num_dims; ++dim) {
      common_.push_back(common_indices(src.pieces(dim), dst.pieces(dim)));
    }
  }

  // Calls visit(range, the block that its holders hold).
  template <typename Visit>
  void for_each(const Visit& visit) {
    choose(0, 0, 0, visit);
  }

 private:
  template <typename Visit>
  void choose(size_t dim, int64_t src_block, int64_t dst_block, const Visit& visit) {
    if (dim == common_.size()) {
      visit(chosen_range(src_block, dst_block), src_block);
      return;
    }
    for (const auto& common : common_[dim]) {
      chosen_[dim] = &common;
      choose(dim + 1, src_block * src_.num_cuts(dim) + common.src_cut,
             dst_block * dst_.num_cuts(dim) + common.dst_cut, visit);
    }
  }

  TransferRange chosen_range(int64_t src_block, int64_t dst_block) const {
    TransferRange range;
    range.indices.reserve(chosen_.size());
    for (const auto* common : chosen_) {
      range.indices.push_back(common->indices);
      range.numel *= num_indices(common->indices);
    }
    range.holders = src_.ranks_of(src_block);
    const auto& wanting = dst_.ranks_of(dst_block);
    std::ranges::set_intersection(wanting, range.holders, std::back_inserter(range.keepers));
    range.receivers.reserve(wanting.size());
    std::ranges::set_difference(wanting, range.holders, std::back_inserter(range.receivers));
    return range;
  }

  const Cuts& src_;
  const Cuts& dst_;
  std::vector<std::vector<Common>> common_;  // by dim
  std::vector<const Common*> chosen_;        // by dim
};

int64_t bytes_at(const RankedMesh& mesh, const Layout& layout, const MeshChangeTask& task, int64_t rank) {
  const auto found = std::ranges::find(mesh.ranks, rank);
  if (found == mesh.ranks.end()) {
    return 0;
  }
  const auto coordinate = coordinate_at(mesh.mesh, found - mesh.ranks.begin());
  return num_elements(local_shape(layout, mesh.mesh, task.shape, coordinate)) * task.itemsize;
}

// Places of ranks in all_ranks().
class Places {
 public:
  explicit Places(const std::vector<int64_t>& ranks) : places_(ranks.empty() ? 0 : ranks.back() + 1) {
    for (size_t place = 0; place < ranks.size(); ++place) {
      places_[ranks[place]] = place;
    }
  }

  size_t operator()(int64_t rank) const { return places_[rank]; }

 private:
  std::vector<size_t> places_;
};

// The least that the busiest sender sends, in elements. Holders of different blocks are different ranks.
int64_t least_busiest(const Transfer& transfer) {
  struct Asked {
    int64_t size = 0;
    int64_t num_holders = 0;
  };
  std::map<int64_t, Asked> asked;  // by the first holder
  for (const auto& range : transfer.ranges) {
    auto& of_block = asked[range.holders.front()];
    of_block.size += range.numel * static_cast<int64_t>(range.receivers.size());
    of_block.num_holders = static_cast<int64_t>(range.holders.size());
  }
  int64_t busiest = 0;
  for (const auto& [holder, of_block] : asked) {
    busiest = std::max(busiest, (of_block.size + of_block.num_holders - 1) / of_block.num_holders);
  }
  return busiest;
}

}  // namespace

Transfer plan_transfer(MeshChangeTask task) {
  check_side("the source", task.src_mesh, task.src);
  check_side("the target", task.dst_mesh, task.dst);
  const Cuts src(task.src_mesh, task.src, task.shape);
  const Cuts dst(task.dst_mesh, task.dst, task.shape);
  Transfer transfer{std::move(task), {}, {}};
  std::map<int64_t, std::vector<Request>> requests;  // by the block that the holders hold
  Ranges(src, dst, transfer.task.shape.size()).for_each([&](TransferRange range, int64_t src_block) {
    for (const int64_t receiver : range.receivers) {
      requests[src_block].push_back({receiver, transfer.ranges.size(), range.numel});
    }
    transfer.ranges.push_back(std::move(range));
  });
  for (auto& [block, of_block] : requests) {
    share(std::move(of_block), src.ranks_of(block), transfer.messages);
  }
  std::ranges::sort(transfer.messages, {}, [](const TransferMessage& message) {
    return std::tuple(message.sender, message.receiver, message.range, message.begin);
  });
  return transfer;
}

std::vector<int64_t> all_ranks(const MeshChangeTask& task) {
  auto ranks = task.src_mesh.ranks;
  ranks.insert(ranks.end(), task.dst_mesh.ranks.begin(), task.dst_mesh.ranks.end());
  std::ranges::sort(ranks);
  // NOLINTNEXTLINE(modernize-use-ranges): clang 14 does not compile std::ranges::unique
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<std::vector<int64_t>> bytes_matrix(const Transfer& transfer) {
  const auto ranks = all_ranks(transfer.task);
  const Places place_of(ranks);
  std::vector<std::vector<int64_t>> bytes(ranks.size(), std::vector<int64_t>(ranks.size()));
  for (const auto& message : transfer.messages) {
    bytes[place_of(message.sender)][place_of(message.receiver)] += message.size * transfer.task.itemsize;
  }
  return bytes;
}

TransferLoads loads_of(const Transfer& transfer) {
  const auto& task = transfer.task;
  const auto ranks = all_ranks(task);
  const Places place_of(ranks);
  std::vector<int64_t> sent(ranks.size());
  std::vector<int64_t> received(ranks.size());
  TransferLoads loads;
  for (const auto& message : transfer.messages) {
    const int64_t bytes = message.size * task.itemsize;
    sent[place_of(message.sender)] += bytes;
    received[place_of(message.receiver)] += bytes;
    loads.total += bytes;
  }
  for (size_t place = 0; place < ranks.size(); ++place) {
    const int64_t after = bytes_at(task.dst_mesh, task.dst, task, ranks[place]);
    const int64_t travels = sent[place] + received[place];
    loads.busiest_sender = std::max(loads.busiest_sender, sent[place]);
    loads.busiest_receiver = std::max(loads.busiest_receiver, received[place]);
    loads.busiest_copier = std::max(loads.busiest_copier, sent[place] + after);
    loads.peak =
        std::max(loads.peak, bytes_at(task.src_mesh, task.src, task, ranks[place]) + travels + after);
  }
  loads.bound = least_busiest(transfer) * task.itemsize;
  return loads;
}

std::string to_string(const Transfer& transfer) {
  std::string text;
  for (const auto& message : transfer.messages) {
    const auto& range = transfer.ranges[message.range];
    text += std::to_string(message.sender) + " -> " + std::to_string(message.receiver) + ": " +
            std::to_string(message.size * transfer.task.itemsize) + " B of [";
    for (size_t dim = 0; dim < range.indices.size(); ++dim) {
      text += dim == 0 ? "" : ", ";
      for (size_t i = 0; i < range.indices[dim].size(); ++i) {
        const auto& interval = range.indices[dim][i];
        text += (i == 0 ? "" : "+") + std::to_string(interval.begin) + ":" + std::to_string(interval.end());
      }
    }
    text += ']';
    if (message.size != range.numel) {
      text += ", from element " + std::to_string(message.begin);
    }
    text += '\n';
  }
  return text;
}

}  // namespace funcol
