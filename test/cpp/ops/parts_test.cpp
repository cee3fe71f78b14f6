#include "ops/parts.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "support/refuses.h"

namespace funcol::parts_test {
namespace {

GroupPtr group(int rank, int size) { return c10::make_intrusive<c10d::ProcessGroup>(rank, size); }

// The whole's shape but along the dim, the dim, the sizes of the parts.
using Case = std::tuple<std::vector<int64_t>, int64_t, std::vector<int64_t>>;

class AllParts : public testing::TestWithParam<Case> {
 protected:
  AllParts() : parts_(std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam())) {
    for (int64_t rank = 0; rank < parts_.num_parts(); ++rank) {
      each_.push_back(at::randint(0, 100, parts_.shape(rank), at::kFloat));
    }
    whole_ = at::cat(each_, parts_.dim());
  }

  // The parts one after the other, each filled up with zeros to `stride` elements.
  at::Tensor flat(int64_t stride = 0) const {
    std::vector<at::Tensor> flat_parts{at::empty({0})};
    for (const auto& part : each_) {
      flat_parts.push_back(part.flatten());
      flat_parts.push_back(at::zeros(std::max<int64_t>(0, stride - part.numel())));
    }
    return at::cat(flat_parts);
  }

  at::Tensor strided_whole() const { return whole_.transpose(0, -1).contiguous().transpose(0, -1); }

  Parts parts_;
  std::vector<at::Tensor> each_;
  at::Tensor whole_;
};

TEST_P(AllParts, AddUpToTheWhole) {
  EXPECT_EQ(at::IntArrayRef(parts_.full_shape()), whole_.sizes());
  EXPECT_EQ(parts_.full_numel(), whole_.numel());
}

TEST_P(AllParts, HaveTheirNumbersOfElements) {
  std::vector<int64_t> expected;
  expected.reserve(each_.size());
  for (const auto& part : each_) {
    expected.push_back(part.numel());
  }
  EXPECT_EQ(parts_.numels(), expected);
  EXPECT_EQ(parts_.max_numel(), std::ranges::max(expected));
}

TEST_P(AllParts, AreViewsOfTheWhole) {
  for (int64_t rank = 0; rank < parts_.num_parts(); ++rank) {
    const auto part = parts_.of(whole_, rank);
    EXPECT_TRUE(part.equal(each_[rank]));
    EXPECT_TRUE(part.is_alias_of(whole_));
  }
}

TEST_P(AllParts, ArePackedOneAfterTheOther) {
  const auto packed = parts_.pack(whole_);
  EXPECT_TRUE(packed.is_contiguous());
  EXPECT_TRUE(packed.equal(flat()));
}

TEST_P(AllParts, ArePackedFromAnyStrides) { EXPECT_TRUE(parts_.pack(strided_whole()).equal(flat())); }

TEST_P(AllParts, ArePackedWithPaddingToTheLargest) {
  EXPECT_TRUE(parts_.pack_padded(whole_).equal(flat(parts_.max_numel())));
  EXPECT_TRUE(parts_.pack_padded(strided_whole()).equal(flat(parts_.max_numel())));
}

TEST_P(AllParts, AreUnpackedAsTheyWerePacked) {
  auto out = at::full_like(whole_, -1);
  parts_.unpack(parts_.pack(whole_), 0, out);
  EXPECT_TRUE(out.equal(whole_));
}

TEST_P(AllParts, AreUnpackedWithoutTheirPadding) {
  auto out = at::full_like(whole_, -1);
  parts_.unpack(parts_.pack_padded(whole_), parts_.max_numel(), out);
  EXPECT_TRUE(out.equal(whole_));
}

TEST_P(AllParts, LieInOrderOnlyIfTheWholeIsAlreadyPacked) {
  if (parts_.lie_in_order()) {
    EXPECT_TRUE(whole_.flatten().equal(flat()));
  }
}

TEST_P(AllParts, ArePackedInMemoryOfTheirOwn) { EXPECT_FALSE(parts_.pack(whole_).is_alias_of(whole_)); }

INSTANTIATE_TEST_SUITE_P(
    Shapes, AllParts,
    testing::Combine(testing::Values(std::vector<int64_t>{2, 3, 4}, std::vector<int64_t>{1, 1, 5},
                                     std::vector<int64_t>{3, 0, 2}),
                     testing::Values(0, 1, 2),
                     testing::Values(std::vector<int64_t>{4}, std::vector<int64_t>{2, 2},
                                     std::vector<int64_t>{1, 3}, std::vector<int64_t>{2, 0, 5},
                                     std::vector<int64_t>{0, 7, 0}, std::vector<int64_t>{0, 0, 0})));

TEST(Parts, AreEqualIfAllHaveOneSize) {
  EXPECT_TRUE(Parts({1, 4}, 0, {3}).are_equal());
  EXPECT_TRUE(Parts({1, 4}, 0, {0, 0}).are_equal());
  EXPECT_FALSE(Parts({1, 4}, 0, {3, 3, 2}).are_equal());
}

TEST(Parts, LieInOrderIfEverySizeBeforeTheDimIsOne) {
  EXPECT_TRUE(Parts({6, 2}, 0, {3, 3}).lie_in_order());
  EXPECT_TRUE(Parts({1, 1, 6}, 2, {3, 3}).lie_in_order());
  EXPECT_FALSE(Parts({2, 6}, 1, {3, 3}).lie_in_order());
}

TEST(Parts, PackMaterialisesConjugationAndNegation) {
  const auto whole = at::randn({2, 5}, at::kComplexFloat);
  const Parts parts({2, 5}, 1, {2, 3});
  EXPECT_TRUE(parts.pack(whole.conj()).equal(parts.pack(whole.conj_physical())));
  EXPECT_TRUE(parts.pack(at::_neg_view(whole)).equal(parts.pack(-whole)));
  EXPECT_TRUE(parts.pack_padded(whole.conj()).equal(parts.pack_padded(whole.conj_physical())));
}

TEST(Parts, OfAWholeAreEqualSharesWithoutSizes) {
  const auto parts = Parts::of_full({2, 6}, 1, {}, *group(1, 3), "x");
  EXPECT_TRUE(parts.are_equal());
  EXPECT_EQ(parts.shape(2), at::DimVector({2, 2}));
}

TEST(Parts, OfAShardAreAllLikeItWithoutSizes) {
  const auto parts = Parts::of_shard({2, 6}, 1, {}, *group(1, 3), "x");
  EXPECT_EQ(parts.full_shape(), at::DimVector({2, 18}));
}

TEST(Parts, OfAWholeHaveTheGivenSizes) {
  const auto parts = Parts::of_full({2, 6}, 1, std::vector<int64_t>{4, 0, 2}, *group(1, 3), "x");
  EXPECT_EQ(parts.shape(0), at::DimVector({2, 4}));
  EXPECT_EQ(parts.numel(1), 0);
}

TEST(Parts, OfAShardAddUpToASizeOfTheirOwn) {
  const auto parts = Parts::of_shard({2, 6}, 1, std::vector<int64_t>{4, 6, 1}, *group(1, 3), "x");
  EXPECT_EQ(parts.full_shape(), at::DimVector({2, 11}));
}

struct Mistake {
  const char* name;
  std::function<void(const std::vector<int64_t>&)> call;
  std::vector<int64_t> sizes;
  std::vector<std::string> words;
};

void cut_whole(const std::vector<int64_t>& sizes) {
  Parts::of_full({6, 2}, 0, sizes, *group(1, 3), "scatter");
}
void join_shards(const std::vector<int64_t>& sizes) {
  Parts::of_shard({6, 2}, 0, sizes, *group(1, 3), "gather");
}

class WrongSizes : public testing::TestWithParam<Mistake> {};

TEST_P(WrongSizes, AreAValueErrorThatNamesOpAndSizes) {
  const auto& mistake = GetParam();
  EXPECT_TRUE(test::refuses<c10::ValueError>([&] { mistake.call(mistake.sizes); }, mistake.words));
}

INSTANTIATE_TEST_SUITE_P(
    Parts, WrongSizes,
    testing::Values(
        Mistake{"TooFew", cut_whole, {6}, {"funcol::scatter", "split_sizes has 1 entries", "3 ranks"}},
        Mistake{"TooMany", join_shards, {6, 6, 6, 6}, {"funcol::gather", "split_sizes has 4 entries"}},
        Mistake{"Negative", cut_whole, {8, -2, 0}, {"funcol::scatter", "[8, -2, 0]", "negative"}},
        Mistake{
            "SumTooLarge", cut_whole, {3, 3, 1}, {"funcol::scatter", "[3, 3, 1]", "sum up to 7", "size 6"}},
        Mistake{"NotTheRanksOwn",
                join_shards,
                {6, 5, 6},
                {"funcol::gather", "[6, 5, 6]", "dim 0 has size 6 on rank 1"}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Parts, OfAWholeThatDoesNotDivideAreAValueError) {
  EXPECT_TRUE(test::refuses<c10::ValueError>(
      [] {
        Parts::of_full({2, 7}, 1, {}, *group(0, 3), "scatter");
      },
      {"dim 1 has size 7", "pass split_sizes"}));
}

}  // namespace
}  // namespace funcol::parts_test
