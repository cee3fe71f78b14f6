// A tensor cut along one dim into one part per rank; parts may differ in size.
//
//   shape (5, 3), dim 0, sizes {2, 3}: rank 0 has rows 0-1, 6 elements; rank 1 rows 2-4, 9 elements
//
// Functions of SymInts keep symbols; a check of symbols becomes an assertion of the graph. They raise
// ValueError naming `op` if split_sizes do not fit.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <vector>

#include "comm/group_ref.h"

namespace funcol {

using SymSizes = std::vector<c10::SymInt>;

// Returns the sizes of the parts of a tensor of size `full_size` along `dim`: split_sizes, which have to sum
// up to `full_size`; without them equal shares, and the number of ranks has to divide `full_size`.
SymSizes sizes_of_parts(const c10::SymInt& full_size, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                        const c10d::ProcessGroup& group, const char* op);

// Returns the sizes of all parts, given this rank's, `shard`, along `dim`: split_sizes, whose entry for this
// rank has to be `shard`; without them every rank's part has that size.
SymSizes sizes_of_shards(const c10::SymInt& shard, int64_t dim, at::OptionalSymIntArrayRef split_sizes,
                         const c10d::ProcessGroup& group, const char* op);

// Raises unless `split_sizes`, the argument of this name, has one size for each rank.
void check_split_sizes(c10::SymIntArrayRef split_sizes, const char* name, const c10d::ProcessGroup& group,
                       const char* op);

// Raises unless this rank sends as many rows to itself as it receives from itself.
void check_own_splits(at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                      const c10d::ProcessGroup& group, const char* op);

c10::SymInt sum(c10::SymIntArrayRef sizes);

// Parts of the shape of `like`, whose sizes may be symbols, but for their sizes along `dim`.
struct TracedParts {
  TracedParts(const at::Tensor& like, int64_t dim, SymSizes sizes);

  // Concatenates `flat_parts`, the elements of each part, along `dim`.
  at::Tensor concatenated(std::vector<at::Tensor> flat_parts) const;

  int64_t dim;
  SymSizes sizes;
  SymSizes numels;
  SymSizes shape;  // of any part, but for `dim`
};

class Parts {
 public:
  // Cuts a full tensor of this shape. Its size along `dim` is the sum of `sizes`; that of `shape` is ignored.
  Parts(at::IntArrayRef shape, int64_t dim, std::vector<int64_t> sizes);

  // Takes sizes as the ops do, checked as in sizes_of_parts(). The full tensor, which is cut, has `shape`.
  static Parts of_full(at::IntArrayRef shape, int64_t dim, at::OptionalIntArrayRef split_sizes,
                       const c10d::ProcessGroup& group, const char* op);
  // Takes the same, but this rank's part has `shape`.
  static Parts of_shard(at::IntArrayRef shape, int64_t dim, at::OptionalIntArrayRef split_sizes,
                        const c10d::ProcessGroup& group, const char* op);

  int64_t dim() const { return dim_; }
  at::IntArrayRef sizes() const { return sizes_; }
  int64_t num_parts() const { return static_cast<int64_t>(sizes_.size()); }
  bool are_equal() const;

  at::DimVector full_shape() const;
  at::DimVector shape(int64_t rank) const;
  int64_t numel(int64_t rank) const { return sizes_[rank] * numel_per_slice_; }
  int64_t max_numel() const;
  int64_t full_numel() const;
  std::vector<int64_t> numels() const;

  // Returns the rank's part of `full`, a view.
  at::Tensor of(const at::Tensor& full, int64_t rank) const;

  // Returns the parts of `full`, each contiguous, one after the other in a new flat tensor. Takes one copy.
  at::Tensor pack(const at::Tensor& full) const;
  // Packs like pack(), with every part padded by zeros to max_numel().
  at::Tensor pack_padded(const at::Tensor& full) const;
  // Fills `full` from flat parts that begin every `stride` elements; stride 0: one right after the other.
  void unpack(const at::Tensor& flat, int64_t stride, const at::Tensor& full) const;
  // Returns true if the packed parts are the full tensor itself, contiguous.
  bool lie_in_order() const;

 private:
  // Calls `visit(flat_part, part)` for each part: in `flat`, where parts begin every `stride` elements (see
  // unpack()), and in `full`. Both views have the part's shape.
  template <typename Visit>
  void visit_parts(const at::Tensor& flat, int64_t stride, const at::Tensor& full, const Visit& visit) const;

  at::DimVector shape_;  // of the full tensor, with 1 along dim_
  int64_t dim_;
  std::vector<int64_t> sizes_;
  int64_t numel_per_slice_;
};

}  // namespace funcol
