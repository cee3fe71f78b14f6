#include "kernels/rank_major.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/rank_major_cases.h"

namespace funcol::kernels::rank_major_test {
namespace {

using Kernel = void (*)(const void*, void*, const ShardShape&, int64_t, int64_t);

// The definitions in layout.h, index by index.
Bytes merged_by_definition(const Bytes& in, const ShardShape& s) {
  Bytes out(in.size());
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t r = 0; r < s.num_ranks; ++r) {
      for (int64_t b = 0; b < s.row_bytes; ++b) {
        out.at((o * s.num_ranks + r) * s.row_bytes + b) = in.at((r * s.outer + o) * s.row_bytes + b);
      }
    }
  }
  return out;
}

Bytes split_by_definition(const Bytes& in, const ShardShape& s) {
  Bytes out(in.size());
  for (int64_t r = 0; r < s.num_ranks; ++r) {
    for (int64_t o = 0; o < s.outer; ++o) {
      for (int64_t b = 0; b < s.row_bytes; ++b) {
        out.at((r * s.outer + o) * s.row_bytes + b) = in.at((o * s.num_ranks + r) * s.row_bytes + b);
      }
    }
  }
  return out;
}

Bytes all_rows(Kernel kernel, const Bytes& in, const ShardShape& shape) {
  Bytes out(in.size(), kGuard);
  kernel(in.data(), out.data(), shape, 0, shape.num_rows());
  return out;
}

class LayoutOfAnyShape : public ::testing::TestWithParam<Sizes> {
 protected:
  const ShardShape shape_ = shape_of(GetParam());
  const Bytes in_ = numbered_bytes(shape_.num_bytes());
};

TEST_P(LayoutOfAnyShape, MergePutsRankMajorBlocksInTensorOrder) {
  EXPECT_EQ(all_rows(merge_shards, in_, shape_), merged_by_definition(in_, shape_));
}

TEST_P(LayoutOfAnyShape, SplitPutsATensorInRankMajorOrder) {
  EXPECT_EQ(all_rows(split_shards, in_, shape_), split_by_definition(in_, shape_));
}

TEST_P(LayoutOfAnyShape, SplitUndoesMerge) {
  EXPECT_EQ(all_rows(split_shards, all_rows(merge_shards, in_, shape_), shape_), in_);
}

INSTANTIATE_TEST_SUITE_P(Sizes, LayoutOfAnyShape,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3, 4, 5, 8, 12, 16, 20, 32, 100, 4096),
                                            ::testing::Values(1, 2, 3, 8, 11),
                                            ::testing::Values(0, 1, 2, 7, 64)),
                         name_of_sizes);

using SizesAndRange = std::tuple<Sizes, int64_t>;

class LayoutInRanges : public ::testing::TestWithParam<SizesAndRange> {
 protected:
  const ShardShape shape_ = shape_of(std::get<0>(GetParam()));
  const int64_t range_ = std::get<1>(GetParam());  // rows in a range
  const Bytes in_ = numbered_bytes(shape_.num_bytes());

  Bytes range_by_range(Kernel kernel) const {
    Bytes out(in_.size(), kGuard);
    for (int64_t begin = 0; begin < shape_.num_rows(); begin += range_) {
      kernel(in_.data(), out.data(), shape_, begin, std::min(begin + range_, shape_.num_rows()));
    }
    return out;
  }

  // The offset in the output of the row that is number `row` in tensor order.
  using OutputOffset = int64_t (*)(int64_t row, const ShardShape& shape);

  static int64_t in_tensor_order(int64_t row, const ShardShape& s) { return row * s.row_bytes; }
  static int64_t in_rank_major_order(int64_t row, const ShardShape& s) {
    return (row % s.num_ranks * s.outer + row / s.num_ranks) * s.row_bytes;
  }

  // For each range, a fresh output holds the rows of the range and is untouched elsewhere.
  void expect_nothing_else_is_written(Kernel kernel, OutputOffset offset) const {
    const Bytes whole = all_rows(kernel, in_, shape_);
    for (int64_t begin = 0; begin < shape_.num_rows(); begin += range_) {
      const int64_t end = std::min(begin + range_, shape_.num_rows());
      Bytes out(whole.size(), kGuard);
      kernel(in_.data(), out.data(), shape_, begin, end);
      Bytes expected(whole.size(), kGuard);
      for (int64_t row = begin; row < end; ++row) {
        std::copy_n(whole.begin() + offset(row, shape_), shape_.row_bytes,
                    expected.begin() + offset(row, shape_));
      }
      ASSERT_EQ(out, expected) << "rows [" << begin << ", " << end << ")";
    }
  }
};

TEST_P(LayoutInRanges, MergeInRangesEqualsOneMerge) {
  EXPECT_EQ(range_by_range(merge_shards), all_rows(merge_shards, in_, shape_));
}

TEST_P(LayoutInRanges, SplitInRangesEqualsOneSplit) {
  EXPECT_EQ(range_by_range(split_shards), all_rows(split_shards, in_, shape_));
}

TEST_P(LayoutInRanges, MergeWritesTheRowsOfItsRangeOnly) {
  expect_nothing_else_is_written(merge_shards, in_tensor_order);
}

TEST_P(LayoutInRanges, SplitWritesTheRowsOfItsRangeOnly) {
  expect_nothing_else_is_written(split_shards, in_rank_major_order);
}

std::string name_of_range(const ::testing::TestParamInfo<SizesAndRange>& param) {
  const auto& [sizes, range] = param.param;
  return name_of_shape(shape_of(sizes)) + "_by_" + std::to_string(range);
}

INSTANTIATE_TEST_SUITE_P(Sizes, LayoutInRanges,
                         ::testing::Combine(::testing::Combine(::testing::Values(1, 3, 4, 20, 100),
                                                               ::testing::Values(1, 2, 3, 8, 11),
                                                               ::testing::Values(1, 2, 7, 64)),
                                            ::testing::Values(1, 3, 8, 50)),
                         name_of_range);

class LayoutOfUnalignedMemory : public ::testing::TestWithParam<Offsets> {
 protected:
  const int64_t in_offset_ = std::get<0>(GetParam());
  const int64_t out_offset_ = std::get<1>(GetParam());
  const ShardShape shape_ = {.num_ranks = 3, .outer = 7, .row_bytes = std::get<2>(GetParam())};
  const Bytes in_ = numbered_bytes(shape_.num_bytes());

  // The output with the bytes around it, which must stay what they were.
  Bytes run(Kernel kernel) const {
    Bytes source(static_cast<size_t>(in_offset_), kGuard);
    source.insert(source.end(), in_.begin(), in_.end());
    Bytes target(static_cast<size_t>(out_offset_) + in_.size() + kMargin, kGuard);
    kernel(source.data() + in_offset_, target.data() + out_offset_, shape_, 0, shape_.num_rows());
    return target;
  }

  Bytes with_surroundings(const Bytes& out) const {
    Bytes target(static_cast<size_t>(out_offset_), kGuard);
    target.insert(target.end(), out.begin(), out.end());
    target.insert(target.end(), kMargin, kGuard);
    return target;
  }
};

TEST_P(LayoutOfUnalignedMemory, MergeIsRightAndStaysInBounds) {
  EXPECT_EQ(run(merge_shards), with_surroundings(merged_by_definition(in_, shape_)));
}

TEST_P(LayoutOfUnalignedMemory, SplitIsRightAndStaysInBounds) {
  EXPECT_EQ(run(split_shards), with_surroundings(split_by_definition(in_, shape_)));
}

INSTANTIATE_TEST_SUITE_P(Offsets, LayoutOfUnalignedMemory,
                         ::testing::Combine(::testing::Values(0, 1, 2, 4), ::testing::Values(0, 1, 2, 4),
                                            ::testing::Values(1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 100)),
                         name_of_offsets);

// More rows than the kernel takes in one block, and an odd rest.
constexpr ShardShape kManyRows = {.num_ranks = 11, .outer = 100'003, .row_bytes = 2};

TEST(Layout, MergeOfManyShortRowsIsRight) {
  const Bytes in = numbered_bytes(kManyRows.num_bytes());
  EXPECT_TRUE(all_rows(merge_shards, in, kManyRows) == merged_by_definition(in, kManyRows));
}

TEST(Layout, SplitOfManyShortRowsIsRight) {
  const Bytes in = numbered_bytes(kManyRows.num_bytes());
  EXPECT_TRUE(all_rows(split_shards, in, kManyRows) == split_by_definition(in, kManyRows));
}

TEST(Layout, MergeOfTheWorkedCaseIsTheWiderTensor) {
  const std::vector<int32_t> in = {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15};
  std::vector<int32_t> out(in.size());
  merge_shards(in.data(), out.data(), {.num_ranks = 2, .outer = 2, .row_bytes = 3 * sizeof(int32_t)}, 0, 4);
  EXPECT_EQ(out, (std::vector<int32_t>{0, 1, 2, 10, 11, 12, 3, 4, 5, 13, 14, 15}));
}

TEST(Layout, AnEmptyTensorMayHaveNoMemory) {
  merge_shards(nullptr, nullptr, {.num_ranks = 4, .outer = 0, .row_bytes = 8}, 0, 0);
  split_shards(nullptr, nullptr, {.num_ranks = 4, .outer = 3, .row_bytes = 0}, 0, 12);
}

}  // namespace
}  // namespace funcol::kernels::rank_major_test
