#include <gtest/gtest.h>

#include "propagation/rules/cut_and_run.h"

namespace funcol::test::embeddings_test {
namespace {

TensorMeta indices(const Shape& shape) { return tensor(shape, Dtype::kInt64); }

OpCall embedding(const Shape& weight, const Shape& index) {
  auto result = index;
  result.push_back(weight.at(1));
  return CallOf("aten::embedding")
      .with("weight", tensor(weight))
      .with("indices", indices(index))
      .with("padding_idx", int64_t{-1})
      .gives(result);
}

TEST(EmbeddingRules, ACutTableMasksTheIndices) {
  EXPECT_TRUE(has_row(embedding({10, 4}, {2, 3}), "MaskP(sum) <- S(0) MaskP(sum)"));
}

TEST(EmbeddingRules, TheMaskIsOfTheTablesRows) {
  EXPECT_EQ(rows_of(embedding({10, 4}, {2, 3})).masks, (std::vector<IndexMask>{{{10, 4}, 0}}));
}

TEST(EmbeddingRules, ResultsFollowColumnsAndIndices) {
  EXPECT_EQ(shard_rows_of(embedding({10, 4}, {2, 3})), (Texts{"S2 <- S1 R", "S0 <- R S0", "S1 <- R S1"}));
}

TEST(EmbeddingRules, PendingTablesGivePendingRows) {
  EXPECT_TRUE(has_row(embedding({10, 4}, {}), "P(max) <- P(max) R"));
}

TEST(EmbeddingRules, NoRankIsWithoutRows) {
  const auto call = embedding({5, 4}, {7});
  EXPECT_TRUE(is_legal(call, {"P"}, {"S0", "P"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"P"}, {"S0", "P"}, {{4}, {}, {}}));
  EXPECT_TRUE(is_legal(call, {"S1"}, {"S1", "R"}, {{8}, {}, {}}));
}

class Lookup : public ::testing::TestWithParam<std::pair<Shape, Shape>> {};

TEST_P(Lookup, OfPartsIsThePartOfTheWhole) {
  const auto op = [](const std::vector<Numbers>& inputs, const Shape& shape) {
    const int64_t columns = inputs[0].shape[1];
    Numbers output{shape, {}};
    for (const double index : inputs[1].values) {
      for (int64_t column = 0; column < columns; ++column) {
        output.values.push_back(inputs[0].values.at(static_cast<int64_t>(index) * columns + column));
      }
    }
    return output;
  };
  EXPECT_TRUE(all_rows_are_right(embedding(GetParam().first, GetParam().second), op));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Lookup,
                         ::testing::Values(std::pair(Shape{12, 4}, Shape{6, 2}),
                                           std::pair(Shape{7, 5}, Shape{3}), std::pair(Shape{4, 1}, Shape{}),
                                           std::pair(Shape{5, 2}, Shape{0, 3})));

OpCall embedding_backward(bool scale_grad_by_freq) {
  return CallOf("aten::embedding_dense_backward")
      .with("grad_output", tensor({2, 3, 4}))
      .with("indices", tensor({2, 3}, Dtype::kInt64))
      .with("scale_grad_by_freq", scale_grad_by_freq)
      .gives({10, 4});
}

TEST(EmbeddingRules, GradientsAddUpOverIndices) {
  EXPECT_EQ(texts_of(embedding_backward(false)), (Texts{"S1 <- S2 R", "P(sum) <- S0 S0", "P(sum) <- S1 S1",
                                                        "P(sum) <- P(sum) R", "P(avg) <- P(avg) R"}));
}

TEST(EmbeddingRules, NoPartKnowsHowOftenAnIndexIsThere) {
  EXPECT_FALSE(has_row(embedding_backward(true), "P(sum) <- S0 S0"));
}

// Sharded vocabularies need a mask, which the texts of rows do not show.

}  // namespace
}  // namespace funcol::test::embeddings_test
