#include <gtest/gtest.h>

#include "propagation/rules/cut_and_run.h"

namespace funcol::test::indexing_test {
namespace {

using Tensors = std::vector<std::optional<TensorMeta>>;

TensorMeta indices(const Shape& shape) { return tensor(shape, Dtype::kInt64); }

OpCall index(const Shape& self, const Tensors& indexed_by, const Shape& result) {
  return CallOf("aten::index.Tensor")
      .with("self", tensor(self))
      .with_list("indices", indexed_by)
      .gives(result);
}

TEST(IndexingRules, NeighboursAreReplacedWhereTheyAre) {
  const auto call = index({2, 3, 4, 5}, {std::nullopt, indices({6, 1}), indices({7})}, {2, 6, 7, 5});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0 R R", "S3 <- S3 R R", "S1 <- R S0 R", "S2 <- R R S0"}));
}

TEST(IndexingRules, IndicesOfDimsApartGoFirst) {
  const auto call = index({2, 3, 4}, {indices({6}), std::nullopt, indices({6})}, {6, 3});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S1 <- S1 R R", "S0 <- R S0 S0"}));
}

TEST(IndexingRules, IndicesThatBroadcastAreWhole) {
  const auto call = index({2, 3}, {indices({6}), indices({1})}, {6});
  EXPECT_EQ(shard_rows_of(call), Texts{"S0 <- R S0 R"});
}

TEST(IndexingRules, AMaskNeedsTheDimsThatItHas) {
  const auto call = index({2, 3, 7, 8}, {std::nullopt, tensor({3, 7}, Dtype::kBool)}, {2, 4, 8});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0 R", "S2 <- S3 R"}));
  EXPECT_TRUE(has_row(call, "P(sum) <- P(sum) R"));
}

TEST(IndexingRules, AMaskHasNoElementTwice) {
  const auto call = CallOf("aten::index_put")
                        .with("self", tensor({2, 3}))
                        .with_list("indices", {tensor({2}, Dtype::kBool)})
                        .with("values", tensor({3}))
                        .with("accumulate", false)
                        .gives(Shape{2, 3});
  EXPECT_EQ(shard_rows_of(call), Texts{"S1 <- S1 R S0"});
  EXPECT_TRUE(has_row(call, "P(sum) <- P(sum) R P(sum)"));
}

OpCall index_put(const Shape& values, bool accumulate) {
  return CallOf("aten::index_put_")
      .with("self", tensor({2, 3, 4}))
      .with_list("indices", {std::nullopt, indices({5})})
      .with("values", tensor(values))
      .with("accumulate", accumulate)
      .gives(Shape{2, 3, 4});
}

TEST(IndexingRules, ValuesFollowTheDimsThatStay) {
  EXPECT_EQ(shard_rows_of(index_put({2, 5, 4}, false)), (Texts{"S0 <- S0 R S0", "S2 <- S2 R S2"}));
}

TEST(IndexingRules, ValuesThatBroadcastAreWhole) {
  EXPECT_EQ(shard_rows_of(index_put({5, 1}, false)), (Texts{"S0 <- S0 R R", "S2 <- S2 R R"}));
}

TEST(IndexingRules, WhatIsAccumulatedAddsUp) {
  EXPECT_TRUE(has_row(index_put({5, 4}, true), "P(sum) <- P(sum) R P(sum)"));
  EXPECT_FALSE(has_row(index_put({5, 4}, true), "P(max) <- P(max) R P(max)"));
}

TEST(IndexingRules, RanksNeedNotWriteTheSameOfSeveralValues) {
  EXPECT_FALSE(has_row(index_put({5, 4}, false), "P(sum) <- P(sum) R P(sum)"));
}

TEST(IndexingRules, SelectedRowsFollowTheirIndices) {
  const auto call = CallOf("aten::index_select")
                        .with("self", tensor({4, 3}))
                        .with("dim", int64_t{0})
                        .with("index", indices({6}))
                        .gives(Shape{6, 3});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- R S0", "S1 <- S1 R"}));
}

OpCall index_fill(Argument value) {
  return CallOf("aten::index_fill_.int_Scalar")
      .with("self", tensor({4, 3}))
      .with("dim", int64_t{0})
      .with("index", indices({2}))
      .with("value", std::move(value))
      .gives(Shape{4, 3});
}

TEST(IndexingRules, OnlyZerosAreFilledIntoSums) {
  EXPECT_TRUE(has_row(index_fill({int64_t{0}}), "P(sum) <- P(sum) R"));
  EXPECT_FALSE(has_row(index_fill({int64_t{2}}), "P(sum) <- P(sum) R"));
  EXPECT_TRUE(has_row(index_fill({int64_t{2}}), "P(max) <- P(max) R"));
}

OpCall scatter(const std::string& op, const Shape& index, const Shape& src) {
  return CallOf(op)
      .with("self", tensor({4, 5, 3}))
      .with("dim", int64_t{1})
      .with("index", indices(index))
      .with("src", tensor(src))
      .gives(Shape{4, 5, 3});
}

TEST(IndexingRules, DimsAsLongInAllAreScatteredInParts) {
  EXPECT_EQ(shard_rows_of(scatter("aten::scatter_.src", {4, 2, 3}, {4, 2, 3})),
            (Texts{"S0 <- S0 S0 S0", "S2 <- S2 S2 S2"}));
}

TEST(IndexingRules, ALongerSourceIsNotCut) {
  EXPECT_EQ(shard_rows_of(scatter("aten::scatter_add", {4, 2, 3}, {6, 2, 3})), Texts{"S2 <- S2 S2 S2"});
}

TEST(IndexingRules, ScatteredSumsArePending) {
  EXPECT_TRUE(has_row(scatter("aten::scatter_add_", {4, 2, 3}, {4, 2, 3}), "P(sum) <- P(sum) R P(sum)"));
}

TEST(IndexingRules, BoundariesBelowAreCounted) {
  const auto call = CallOf("aten::bucketize.Tensor")
                        .with("self", tensor({4}))
                        .with("boundaries", tensor({7}))
                        .gives(Shape{4});
  EXPECT_EQ(texts_of(call),
            (Texts{"S0 <- S0 R", "P(sum) <- R S0", "P(max) <- P(max) R", "P(min) <- P(min) R"}));
}

OpCall gather(const Shape& self, int64_t dim, const Shape& index) {
  return CallOf("aten::gather")
      .with("self", tensor(self))
      .with("dim", dim)
      .with("index", indices(index))
      .with("sparse_grad", false)
      .gives(index);
}

TEST(GatherRules, AnIndexOfOneMayBeMasked) {
  EXPECT_TRUE(has_row(gather({4, 5, 3}, -2, {4, 1, 3}), "MaskP(sum) <- S(1) MaskP(sum)"));
  EXPECT_FALSE(has_row(gather({4, 5, 3}, -2, {4, 2, 3}), "MaskP(sum) <- S(1) MaskP(sum)"));
}

TEST(GatherRules, ItsMaskIsOfTheGatheredDim) {
  EXPECT_EQ(rows_of(gather({4, 5, 3}, -2, {4, 1, 3})).masks, (std::vector<IndexMask>{{{4, 5, 3}, 1}}));
}

TEST(GatherRules, DimsInWhichTheIndexIsShorterAreNotCut) {
  EXPECT_EQ(shard_rows_of(gather({4, 5, 3}, 1, {4, 2, 2})), (Texts{"S1 <- R S1", "S0 <- S0 S0"}));
}

TEST(GatherRules, NoRankIsWithoutTheGatheredDim) {
  const auto call = gather({4, 5}, 1, {4, 1});
  EXPECT_TRUE(is_legal(call, {"P"}, {"S1", "P"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"P"}, {"S1", "P"}, {{4}, {}, {}}));
  EXPECT_TRUE(is_legal(call, {"S0"}, {"S0", "S0"}, {{8}, {}, {}}));
}

TEST(GatherRules, OfAScalarAreThoseOfItsPartials) { EXPECT_TRUE(shard_rows_of(gather({}, 0, {})).empty()); }

class Gathering : public ::testing::TestWithParam<std::tuple<Shape, int64_t, Shape>> {};

TEST_P(Gathering, OfPartsIsThePartOfTheWhole) {
  const auto& [self, dim, index] = GetParam();
  const auto op = [dim = dim](const std::vector<Numbers>& inputs, const Shape& shape) {
    Numbers output{shape, {}};
    for (int64_t element = 0; element < num_elements(shape); ++element) {
      auto at = index_of(element, shape);
      at[dim] = static_cast<int64_t>(inputs[1].values.at(element));
      output.values.push_back(inputs[0].values.at(element_at(at, inputs[0].shape)));
    }
    return output;
  };
  EXPECT_TRUE(all_rows_are_right(gather(self, dim, index), op));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Gathering,
                         ::testing::Values(std::tuple(Shape{6, 4}, 0, Shape{1, 4}),
                                           std::tuple(Shape{5, 7, 3}, 1, Shape{5, 1, 3}),
                                           std::tuple(Shape{5, 7}, 1, Shape{3, 4}),
                                           std::tuple(Shape{2, 2}, 0, Shape{1, 2}),
                                           std::tuple(Shape{9}, 0, Shape{1})));

OpCall cat(const std::vector<Shape>& shapes, int64_t dim, const Shape& result) {
  Tensors tensors;
  for (const auto& shape : shapes) {
    tensors.emplace_back(tensor(shape));
  }
  return CallOf("aten::cat").with_list("tensors", tensors).with("dim", dim).gives(result);
}

TEST(JoiningRules, TheJoinedDimIsWhole) {
  EXPECT_EQ(shard_rows_of(cat({{2, 3}, {4, 3}}, -2, {6, 3})), Texts{"S1 <- S1 S1"});
}

TEST(JoiningRules, EmptyVectorsArePassedOver) {
  EXPECT_EQ(shard_rows_of(cat({{0}, {4, 3}}, 0, {4, 3})), Texts{"S1 <- R S1"});
}

TEST(JoiningRules, AStackShiftsDimsBehindTheNewOne) {
  const auto call = CallOf("aten::stack")
                        .with_list("tensors", {tensor({2, 3}), tensor({2, 3})})
                        .with("dim", int64_t{-2})
                        .gives(Shape{2, 2, 3});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0 S0", "S2 <- S1 S1"}));
}

TEST(JoiningRules, ASourceLacksTheDimItIsSelectedIn) {
  const auto call = CallOf("aten::select_scatter")
                        .with("self", tensor({2, 3, 4}))
                        .with("src", tensor({2, 4}))
                        .with("dim", int64_t{1})
                        .gives(Shape{2, 3, 4});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0 S0", "S2 <- S2 S1"}));
}

OpCall padded(const Shape& amounts, int64_t value) {
  return CallOf("aten::constant_pad_nd")
      .with("self", tensor({2, 3}))
      .with("pad", integers(amounts))
      .with("value", value)
      .gives(Shape{2, 3});
}

TEST(JoiningRules, PaddedDimsAreWhole) {
  EXPECT_EQ(shard_rows_of(padded({1, 0}, 0)), Texts{"S0 <- S0"});
  EXPECT_EQ(shard_rows_of(padded({0, 0, 2, 2}, 0)), Texts{"S1 <- S1"});
}

TEST(JoiningRules, OnlyZerosPadSums) {
  EXPECT_TRUE(has_row(padded({1, 0}, 0), "P(sum) <- P(sum)"));
  EXPECT_FALSE(has_row(padded({1, 0}, 5), "P(sum) <- P(sum)"));
}

TEST(JoiningRules, TensorsAreComparedInParts) {
  const auto compared = [](const Shape& other) {
    return CallOf("aten::equal").with("self", tensor({2})).with("other", tensor(other)).gives(Tensors{});
  };
  EXPECT_EQ(texts_of(compared({2})), Texts{"<- S0 S0"});
  EXPECT_TRUE(texts_of(compared({1})).empty());
}

class Concatenation : public ::testing::TestWithParam<std::vector<Shape>> {};

TEST_P(Concatenation, OfPartsIsThePartOfTheWhole) {
  const auto op = [](const std::vector<Numbers>& inputs, const Shape&) {
    Numbers output{{0, inputs.at(0).shape[1]}, {}};
    for (const auto& input : inputs) {
      output.shape[0] += input.shape[0];
      output.values.insert(output.values.end(), input.values.begin(), input.values.end());
    }
    return output;
  };
  int64_t rows = 0;
  for (const auto& shape : GetParam()) {
    rows += shape[0];
  }
  EXPECT_TRUE(all_rows_are_right(cat(GetParam(), 0, {rows, GetParam()[0][1]}), op));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Concatenation,
                         ::testing::Values(std::vector<Shape>{{2, 6}, {3, 6}},
                                           std::vector<Shape>{{2, 5}, {0, 5}}, std::vector<Shape>{{4, 1}}));

}  // namespace
}  // namespace funcol::test::indexing_test
