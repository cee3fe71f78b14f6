#include "ops/layout_change.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

namespace funcol::layout_change_test {
namespace {

// A shard's shape, the number of ranks, the dim, the dtype.
using Case = std::tuple<std::vector<int64_t>, int64_t, int64_t, at::ScalarType>;

class Layouts : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const auto& [sizes, num_ranks, dim, dtype] = GetParam();
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      shards_.push_back(at::randint(0, 100, sizes, at::kFloat).to(dtype));
    }
    whole_ = at::cat(shards_, dim);
    rank_major_ = at::cat(shards_, 0);
  }
  int64_t num_ranks() const { return std::get<1>(GetParam()); }
  int64_t dim() const { return std::get<2>(GetParam()); }

  std::vector<at::Tensor> shards_;
  at::Tensor whole_;
  at::Tensor rank_major_;
};

TEST_P(Layouts, MergeConcatenatesTheShardsAlongTheDim) {
  auto out = at::empty_like(whole_);
  merge_shards(rank_major_, out, num_ranks(), dim());
  EXPECT_TRUE(out.equal(whole_));
}

TEST_P(Layouts, SplitPutsTheShardsOneAfterTheOther) {
  const auto out = split_shards(whole_, num_ranks(), dim());
  EXPECT_TRUE(out.is_contiguous());
  EXPECT_TRUE(out.equal(rank_major_));
}

TEST_P(Layouts, SplitTakesAnyStrides) {
  const auto strided = whole_.transpose(0, -1).contiguous().transpose(0, -1);
  EXPECT_TRUE(split_shards(strided, num_ranks(), dim()).equal(rank_major_));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Layouts,
    testing::Combine(testing::Values(std::vector<int64_t>{2, 3}, std::vector<int64_t>{1, 5, 4},
                                     std::vector<int64_t>{3, 1, 7}, std::vector<int64_t>{0, 4},
                                     std::vector<int64_t>{4, 0, 2}, std::vector<int64_t>{129, 67}),
                     testing::Values(1, 2, 3), testing::Values(0, 1),
                     testing::Values(at::kFloat, at::kByte, at::kDouble, at::kBFloat16, at::kComplexDouble)));

TEST(LayoutChange, AreRankMajorIfNothingComesBeforeTheDim) {
  EXPECT_TRUE(is_rank_major({4, 5}, 0));
  EXPECT_TRUE(is_rank_major({1, 1, 5}, 2));
  EXPECT_FALSE(is_rank_major({1, 2, 5}, 2));
}

TEST(LayoutChange, SplitMaterialisesConjugation) {
  const auto tensor = at::randn({2, 4}, at::kComplexFloat);
  EXPECT_TRUE(split_shards(tensor.conj(), 2, 1).equal(split_shards(tensor.conj().resolve_conj(), 2, 1)));
}

}  // namespace
}  // namespace funcol::layout_change_test
