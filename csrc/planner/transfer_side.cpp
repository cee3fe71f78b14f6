#include "planner/transfer_side.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace funcol {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& why) {
  throw std::invalid_argument("plan_transfer: " + std::string(name) + why);
}

void check(const char* name, const RankedMesh& mesh, const Layout& layout) {
  if (static_cast<int64_t>(mesh.ranks.size()) != mesh.mesh.num_ranks()) {
    refuse(name, " mesh has " + std::to_string(mesh.ranks.size()) + " ranks for " +
                     std::to_string(mesh.mesh.num_ranks()) + " coordinates. Give one rank for each.");
  }
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    if (layout.placements[axis].is_partial() && mesh.mesh.sizes[axis] > 1) {
      refuse(name, " layout " + to_string(layout) + " has partial values. Reduce them before.");
    }
  }
}

}  // namespace

TransferSide::TransferSide(const char* name, const RankedMesh& mesh, const Layout& layout,
                           const std::vector<int64_t>& shape) {
  check(name, mesh, layout);
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    auto& cuts = cuts_.emplace_back();
    for_all_coordinates(mesh.mesh, layout.axes_of(static_cast<int64_t>(dim)), [&](const Coordinate& at) {
      cuts.push_back(local_indices(layout, mesh.mesh, static_cast<int64_t>(dim), shape[dim], at));
      return true;
    });
  }
  find_ranks(name, mesh, layout);
}

void TransferSide::find_ranks(const char* name, const RankedMesh& mesh, const Layout& layout) {
  int64_t num_blocks = 1;
  // By axis, the difference between the blocks of neighbors.
  std::vector<int64_t> strides(mesh.mesh.sizes.size());
  for (size_t dim = num_dims(); dim-- > 0;) {
    int64_t stride = num_blocks;
    const auto& axes = layout.axes_of(static_cast<int64_t>(dim));
    for (size_t i = axes.size(); i-- > 0;) {
      strides[axes[i]] = stride;
      stride *= mesh.mesh.sizes[axes[i]];
    }
    num_blocks *= num_cuts(dim);
  }
  for (int64_t place = 0; place < std::ssize(mesh.ranks); ++place) {
    const auto at = mesh.mesh.coordinate(place);
    ranks_.push_back(
        {mesh.ranks[place], std::inner_product(at.begin(), at.end(), strides.begin(), int64_t{0})});
  }
  std::ranges::sort(ranks_, {}, &Rank::rank);
  if (std::ranges::adjacent_find(ranks_, {}, &Rank::rank) != ranks_.end()) {
    refuse(name, " mesh lists a rank twice. Give each coordinate a rank of its own.");
  }
  num_holders_ = std::ssize(ranks_) / num_blocks;
  by_block_.resize(ranks_.size());
  std::vector<int64_t> num_found(num_blocks);
  for (const auto& [rank, block] : ranks_) {
    by_block_[block * num_holders_ + num_found[block]++] = rank;
  }
}

int64_t num_common(const TransferSide& a, int64_t block_of_a, const TransferSide& b, int64_t block_of_b) {
  int64_t product = 1;
  for (size_t dim = a.num_dims(); dim-- > 0 && product > 0;) {
    product *= num_common(a.indices(dim, block_of_a % a.num_cuts(dim)),
                          b.indices(dim, block_of_b % b.num_cuts(dim)));
    block_of_a /= a.num_cuts(dim);
    block_of_b /= b.num_cuts(dim);
  }
  return product;
}

std::vector<CutShare> shares_of(const Intervals& indices, const TransferSide& side, size_t dim) {
  std::vector<CutShare> shares;
  for (int64_t cut = 0; cut < side.num_cuts(dim); ++cut) {
    if (const int64_t size = num_common(indices, side.indices(dim, cut)); size > 0) {
      shares.push_back({cut, size});
    }
  }
  return shares;
}

}  // namespace funcol
