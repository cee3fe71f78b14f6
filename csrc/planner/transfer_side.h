// One end of a move between meshes: which part of the tensor each rank holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "planner/transfer.h"

namespace funcol {

// One end of a move: the blocks into which its layout cuts the tensor, and the ranks that hold them. A block
// is a cut of each dim; blocks are numbered along the last dim first. Equally many ranks hold each block.
class TransferSide {
 public:
  struct Rank {
    int64_t rank;
    int64_t block;
  };

  // Throws what plan_transfer() throws. `name` is "the source" or "the target", for error messages.
  TransferSide(const char* name, const RankedMesh& mesh, const Layout& layout,
               const std::vector<int64_t>& shape);

  size_t num_dims() const { return cuts_.size(); }
  int64_t num_cuts(size_t dim) const { return std::ssize(cuts_[dim]); }
  const Intervals& indices(size_t dim, int64_t cut) const { return cuts_[dim][cut]; }
  // Returns the cuts of a block, by dim.
  std::vector<int64_t> cuts_of(int64_t block) const {
    std::vector<int64_t> cuts(num_dims());
    for (size_t dim = num_dims(); dim-- > 0;) {
      cuts[dim] = block % num_cuts(dim);
      block /= num_cuts(dim);
    }
    return cuts;
  }
  int64_t numel(int64_t block) const {
    int64_t product = 1;
    for (size_t dim = num_dims(); dim-- > 0;) {
      product *= num_indices(cuts_[dim][block % num_cuts(dim)]);
      block /= num_cuts(dim);
    }
    return product;
  }

  int64_t num_blocks() const { return std::ssize(ranks_) / num_holders_; }
  int64_t num_holders() const { return num_holders_; }  // of a block
  // Returns the ranks that hold a block, ascending.
  std::span<const int64_t> holders(int64_t block) const {
    return {by_block_.data() + block * num_holders_, static_cast<size_t>(num_holders_)};
  }
  const std::vector<Rank>& ranks() const { return ranks_; }  // ascending
  const Rank* find(int64_t rank) const {
    const auto found = std::ranges::lower_bound(ranks_, rank, {}, &Rank::rank);
    return found != ranks_.end() && found->rank == rank ? &*found : nullptr;
  }

 private:
  void find_ranks(const char* name, const RankedMesh& mesh, const Layout& layout);

  std::vector<std::vector<Intervals>> cuts_;  // by dim, by cut
  std::vector<Rank> ranks_;
  std::vector<int64_t> by_block_;
  int64_t num_holders_ = 1;
};

// Returns the number of elements that two blocks have in common.
int64_t num_common(const TransferSide& a, int64_t block_of_a, const TransferSide& b, int64_t block_of_b);

// A cut, and the number of its indices that others share.
struct CutShare {
  int64_t cut;
  int64_t size;
};

// Returns the cuts of a dim of `side` that have any of `indices`.
std::vector<CutShare> shares_of(const Intervals& indices, const TransferSide& side, size_t dim);

// Calls visit(block, size) for the blocks of `other` that have `size` > 0 elements of a block of `side`.
template <typename Visit>
void for_each_common_block(const TransferSide& side, int64_t block, const TransferSide& other,
                           const Visit& visit) {
  std::vector<std::vector<CutShare>> shares;  // by dim
  shares.reserve(side.num_dims());
  const auto cuts = side.cuts_of(block);
  for (size_t dim = 0; dim < side.num_dims(); ++dim) {
    shares.push_back(shares_of(side.indices(dim, cuts[dim]), other, dim));
  }
  const auto choose = [&](const auto& recurse, size_t dim, int64_t chosen, int64_t size) -> void {
    if (dim == shares.size()) {
      visit(chosen, size);
      return;
    }
    for (const auto& share : shares[dim]) {
      recurse(recurse, dim + 1, chosen * other.num_cuts(dim) + share.cut, size * share.size);
    }
  };
  choose(choose, 0, 0, 1);
}

}  // namespace funcol
