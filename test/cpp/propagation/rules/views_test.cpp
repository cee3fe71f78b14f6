#include <gtest/gtest.h>

#include "propagation/rules/cut_and_run.h"

namespace funcol::test::views_test {
namespace {

TEST(ViewRules, APermutationTakesShardsAlong) {
  const auto call = CallOf("aten::permute")
                        .with("self", tensor({2, 3, 4}))
                        .with("dims", integers({2, 0, -2}))
                        .gives({4, 2, 3});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S1 <- S0", "S2 <- S1", "S0 <- S2"}));
}

TEST(ViewRules, AMatrixTransposedInPlace) {
  const auto call = CallOf("aten::t_").with("self", tensor({2, 3})).gives(std::vector<int64_t>{3, 2});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S1 <- S0", "S0 <- S1"}));
}

TEST(ViewRules, AVectorTransposedIsItself) {
  const auto call = CallOf("aten::t").with("self", tensor({3})).gives(std::vector<int64_t>{3});
  EXPECT_EQ(shard_rows_of(call), Texts{"S0 <- S0"});
}

TEST(ViewRules, DimsMoveAndOthersCloseUp) {
  const auto call = CallOf("aten::movedim.intlist")
                        .with("self", tensor({2, 3, 4}))
                        .with("source", integers({0}))
                        .with("destination", integers({-1}))
                        .gives({3, 4, 2});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S2 <- S0", "S0 <- S1", "S1 <- S2"}));
}

TEST(ViewRules, ANewDimShiftsThoseBehind) {
  const auto call =
      CallOf("aten::unsqueeze").with("self", tensor({2, 3})).with("dim", int64_t{-2}).gives({2, 1, 3});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0", "S2 <- S1"}));
}

TEST(ViewRules, SqueezingDropsDimsOfOneElement) {
  const auto call =
      CallOf("aten::squeeze").with("self", tensor({1, 3, 1, 4})).gives(std::vector<int64_t>{3, 4});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S1", "S1 <- S3"}));
}

TEST(ViewRules, SqueezingNamedDimsKeepsOthers) {
  const auto call =
      CallOf("aten::squeeze.dim").with("self", tensor({1, 3, 1})).with("dim", int64_t{1}).gives({1, 3, 1});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0", "S1 <- S1", "S2 <- S2"}));
}

TEST(ViewRules, AnExpandedDimIsWhole) {
  const auto call = CallOf("aten::expand").with("self", tensor({1, 4})).gives({3, 5, 4});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S2 <- S1"}));
}

TEST(ViewRules, ARepeatedDimIsWhole) {
  const auto call = CallOf("aten::repeat")
                        .with("self", tensor({3, 4}))
                        .with("repeats", integers({2, 1, 2}))
                        .gives({2, 3, 8});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S1 <- S0"}));
}

TEST(ViewRules, ASelectedDimIsWhole) {
  const auto call = CallOf("aten::select.int")
                        .with("self", tensor({2, 3, 4}))
                        .with("dim", int64_t{1})
                        .with("index", int64_t{0})
                        .gives(std::vector<int64_t>{2, 4});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0", "S1 <- S2"}));
}

TEST(ViewRules, EveryPartOfASplitIsPlacedAlike) {
  const auto call = CallOf("aten::split.Tensor")
                        .with("self", tensor({4, 3}))
                        .with("split_size", int64_t{2})
                        .with("dim", int64_t{0})
                        .gives({tensor({2, 3}), tensor({2, 3})});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S1 S1 <- S1"}));
  EXPECT_TRUE(has_row(call, "P(max) P(max) <- P(max)"));
}

TEST(ViewRules, ASliceOfAllIsNoSlice) {
  const auto slice_of = [](int64_t length) {
    return CallOf("aten::slice.Tensor")
        .with("self", tensor({4, 3}))
        .with("dim", int64_t{0})
        .gives({length, 3});
  };
  EXPECT_EQ(shard_rows_of(slice_of(4)), (Texts{"S0 <- S0", "S1 <- S1"}));
  EXPECT_EQ(shard_rows_of(slice_of(3)), (Texts{"S1 <- S1"}));
}

TEST(ViewRules, PartsOfComplexNumbersHaveNoProducts) {
  const auto call = CallOf("aten::view_as_real").with("self", tensor({4}, Dtype::kComplex64)).gives({4, 2});
  EXPECT_TRUE(has_row(call, "P(sum) <- P(sum)"));
  EXPECT_FALSE(has_row(call, "P(product) <- P(product)"));
}

TEST(ViewRules, ADiagonalOfOtherDimsKeepsShards) {
  const auto call = CallOf("aten::diagonal")
                        .with("self", tensor({5, 4, 4}))
                        .with("offset", int64_t{0})
                        .with("dim1", int64_t{-2})
                        .with("dim2", int64_t{-1})
                        .gives(std::vector<int64_t>{5, 4});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0"}));
}

TEST(ViewRules, ATriangleOfAMatrixNeedsAllOfIt) {
  const auto call = CallOf("aten::tril").with("self", tensor({5, 4, 4})).gives({5, 4, 4});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0"}));
}

TEST(ViewRules, RollingWithoutDimsNeedsAll) {
  const auto call =
      CallOf("aten::roll").with("self", tensor({5, 4})).with("dims", integers({})).gives({5, 4});
  EXPECT_TRUE(shard_rows_of(call).empty());
}

TEST(ViewRules, AGradientGoesBackToWhereItWasSelected) {
  const auto call = CallOf("aten::select_backward")
                        .with("grad_output", tensor({2, 4}))
                        .with("input_sizes", integers({2, 3, 4}))
                        .with("dim", int64_t{1})
                        .gives({2, 3, 4});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0", "S2 <- S1"}));
}

class Transposition : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(Transposition, OfPartsIsThePartOfTheWhole) {
  const auto& shape = GetParam();
  const std::vector<int64_t> swapped{shape[2], shape[1], shape[0]};
  const auto op = [](const std::vector<Numbers>& inputs, const std::vector<int64_t>&) {
    const auto& from = inputs.at(0);
    Numbers to{{from.shape[2], from.shape[1], from.shape[0]}, {}};
    for (int64_t element = 0; element < num_elements(to.shape); ++element) {
      auto index = index_of(element, to.shape);
      std::swap(index[0], index[2]);
      to.values.push_back(from.values.at(element_at(index, from.shape)));
    }
    return to;
  };
  const auto call = CallOf("aten::transpose.int")
                        .with("self", tensor(shape))
                        .with("dim0", int64_t{0})
                        .with("dim1", int64_t{-1})
                        .gives(swapped);
  EXPECT_TRUE(all_rows_are_right(call, op));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Transposition,
                         ::testing::Values(std::vector<int64_t>{6, 12, 6}, std::vector<int64_t>{5, 1, 7},
                                           std::vector<int64_t>{2, 0, 3}));

}  // namespace
}  // namespace funcol::test::views_test
