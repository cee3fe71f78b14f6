#include "kernels/rank_major.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>

namespace funcol::kernels {
namespace {

struct Range {
  int64_t begin;
  int64_t end;
};

// Ways to copy one row. For a short row a call of memcpy costs more than the copy itself, so rows of up to 32
// bytes use plain loads and stores: of one piece, or of two that may overlap.
template <int64_t kBytes>
struct OnePiece {
  static constexpr int64_t num_bytes = kBytes;

  void copy(std::byte* out, const std::byte* in) const { std::memcpy(out, in, kBytes); }
};

template <int64_t kPieceBytes>
struct TwoPieces {
  int64_t num_bytes;  // kPieceBytes to 2 * kPieceBytes

  void copy(std::byte* out, const std::byte* in) const {
    const int64_t second = num_bytes - kPieceBytes;
    std::memcpy(out, in, kPieceBytes);
    std::memcpy(out + second, in + second, kPieceBytes);
  }
};

struct AnyLength {
  int64_t num_bytes;

  void copy(std::byte* out, const std::byte* in) const {
    std::memcpy(out, in, static_cast<size_t>(num_bytes));
  }
};

// Rows of a page or more. New memory is mapped at the first write to each page, and that is cheaper before a
// memcpy than in the middle of one.
struct ManyPages {
  static constexpr int64_t kPageBytes = 4096;
  int64_t num_bytes;

  void copy(std::byte* out, const std::byte* in) const {
    for (int64_t page = 0; page < num_bytes; page += kPageBytes) {
      map_page_of(out + page);
    }
    map_page_of(out + num_bytes - 1);  // rows need not start where pages do
    std::memcpy(out, in, static_cast<size_t>(num_bytes));
  }

  static void map_page_of(std::byte* address) { *static_cast<volatile std::byte*>(address) = std::byte{0}; }
};

// Copies the rows of a range of ranks and a range of outer indices. The buffer in tensor order is walked in
// sequence, the rank-major buffer in one stream a rank.
template <Change kChange, typename Row>
class RowMover {
 public:
  RowMover(const void* in, void* out, const ShardShape& shape, Row row)
      : in_(static_cast<const std::byte*>(in)),
        out_(static_cast<std::byte*>(out)),
        row_(row),
        rank_stride_(shape.outer * row.num_bytes),
        outer_stride_(shape.num_ranks * row.num_bytes) {}

  void move(Range ranks, Range outers) const {
    const int64_t block = std::max<int64_t>(1, kBlockBytes / outer_stride_);
    for (int64_t begin = outers.begin; begin < outers.end; begin += block) {
      move_block(ranks, {begin, std::min(begin + block, outers.end)});
    }
  }

 private:
  // The size of a block: long streams, which fit a cache that keeps the lines shared by several strips.
  static constexpr int64_t kBlockBytes = int64_t{256} * 1024;

  // Moves a block in strips of at most 8 ranks: the streams are often a large power of two apart, and more
  // streams than a cache set has ways would evict each other.
  void move_block(Range ranks, Range outers) const {
    int64_t rank = ranks.begin;
    for (; rank + 8 <= ranks.end; rank += 8) {
      move_strip<8>(rank, outers);
    }
    for (; rank + 2 <= ranks.end; rank += 2) {
      move_strip<2>(rank, outers);
    }
    for (; rank < ranks.end; ++rank) {
      move_strip<1>(rank, outers);
    }
  }

  template <int64_t kNumRanks>
  void move_strip(int64_t first_rank, Range outers) const {
    int64_t by_rank = first_rank * rank_stride_ + outers.begin * row_.num_bytes;
    int64_t in_tensor = outers.begin * outer_stride_ + first_rank * row_.num_bytes;
    for (int64_t o = outers.begin; o < outers.end; ++o) {
#pragma GCC unroll 8
      for (int64_t r = 0; r < kNumRanks; ++r) {
        move_row(by_rank + r * rank_stride_, in_tensor + r * row_.num_bytes);
      }
      by_rank += row_.num_bytes;
      in_tensor += outer_stride_;
    }
  }

  void move_row(int64_t by_rank, int64_t in_tensor) const {
    if constexpr (kChange == Change::kMerge) {
      row_.copy(out_ + in_tensor, in_ + by_rank);
    } else {
      row_.copy(out_ + by_rank, in_ + in_tensor);
    }
  }

  const std::byte* in_;
  std::byte* out_;
  Row row_;
  int64_t rank_stride_;   // from a rank's row to the next rank's, in rank-major order
  int64_t outer_stride_;  // from an outer index to the next, in tensor order
};

// Copies the rows [begin, end), counted in tensor order, as rectangles of outer indices and ranks: the rest
// of the first outer index, complete outer indices, the start of the last one.
template <Change kChange, typename Row>
void move_rows(const void* in, void* out, const ShardShape& shape, Row row, int64_t begin, int64_t end) {
  const RowMover<kChange, Row> mover(in, out, shape, row);
  Range complete = {begin / shape.num_ranks, end / shape.num_ranks};
  const int64_t head = begin % shape.num_ranks;
  const int64_t tail = end % shape.num_ranks;
  if (complete.begin == complete.end) {
    mover.move({head, tail}, {complete.begin, complete.begin + 1});
    return;
  }
  if (head > 0) {
    mover.move({head, shape.num_ranks}, {complete.begin, complete.begin + 1});
    ++complete.begin;
  }
  mover.move({0, shape.num_ranks}, complete);
  mover.move({0, tail}, {complete.end, complete.end + 1});
}

template <Change kChange>
void change_layout(const void* in, void* out, const ShardShape& shape, int64_t begin, int64_t end) {
  assert(0 <= begin && begin <= end && end <= shape.num_rows());
  const int64_t bytes = shape.row_bytes;
  if (begin >= end || bytes == 0) {
    return;
  }
  if (shape.num_ranks == 1 || shape.outer == 1) {  // both orders agree
    const int64_t skipped = begin * bytes;
    std::memcpy(static_cast<std::byte*>(out) + skipped, static_cast<const std::byte*>(in) + skipped,
                static_cast<size_t>((end - begin) * bytes));
    return;
  }
  const auto move = [&](auto row) { move_rows<kChange>(in, out, shape, row, begin, end); };
  switch (bytes) {
    case 1:
      return move(OnePiece<1>{});
    case 2:
      return move(OnePiece<2>{});
    case 4:
      return move(OnePiece<4>{});
    case 8:
      return move(OnePiece<8>{});
    case 16:
      return move(OnePiece<16>{});
    default:
      break;
  }
  if (bytes < 4) {
    move(TwoPieces<2>{bytes});
  } else if (bytes < 8) {
    move(TwoPieces<4>{bytes});
  } else if (bytes < 16) {
    move(TwoPieces<8>{bytes});
  } else if (bytes <= 32) {
    move(TwoPieces<16>{bytes});
  } else if (bytes < ManyPages::kPageBytes) {
    move(AnyLength{bytes});
  } else {
    move(ManyPages{bytes});
  }
}

}  // namespace

void merge_shards(const void* in, void* out, const ShardShape& shape, int64_t begin, int64_t end) {
  change_layout<Change::kMerge>(in, out, shape, begin, end);
}

void split_shards(const void* in, void* out, const ShardShape& shape, int64_t begin, int64_t end) {
  change_layout<Change::kSplit>(in, out, shape, begin, end);
}

}  // namespace funcol::kernels
