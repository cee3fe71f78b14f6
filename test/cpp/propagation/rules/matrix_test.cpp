#include <gtest/gtest.h>

#include "propagation/rules/cut_and_run.h"

namespace funcol::test::matrix_test {
namespace {

using ::testing::Values;

OpCall mm(int64_t m, int64_t k, int64_t n) {
  return CallOf("aten::mm").with("self", tensor({m, k})).with("mat2", tensor({k, n})).gives({m, n});
}

OpCall addmm(const std::vector<int64_t>& bias) {
  return CallOf("aten::addmm")
      .with("self", tensor(bias))
      .with("mat1", tensor({4, 6}))
      .with("mat2", tensor({6, 5}))
      .gives(std::vector<int64_t>{4, 5});
}

TEST(MatrixRules, OfAProduct) {
  EXPECT_EQ(texts_of(mm(4, 6, 5)),
            (std::vector<std::string>{"S0 <- S0 R", "S1 <- R S1", "P(sum) <- S1 S0", "P(sum) <- P(sum) R",
                                      "P(sum) <- R P(sum)", "P(avg) <- P(avg) R", "P(avg) <- R P(avg)"}));
}

TEST(MatrixRules, ABiasOfColumnsIsCutWithThem) {
  const auto call = addmm({5});
  EXPECT_TRUE(has_row(call, "S0 <- R S0 R"));
  EXPECT_TRUE(has_row(call, "S1 <- S0 R S1"));
}

TEST(MatrixRules, ABiasOfOneElementIsWhole) { EXPECT_TRUE(has_row(addmm({1, 1}), "S1 <- R R S1")); }

TEST(MatrixRules, ASumTakesItsBiasInParts) {
  EXPECT_TRUE(has_row(addmm({5}), "P(sum) <- P(sum) S1 S0"));
  EXPECT_FALSE(has_row(addmm({5}), "P(sum) <- R S1 S0"));
}

TEST(MatrixRules, ABatchIsCutInAll) {
  const auto call = CallOf("aten::bmm")
                        .with("self", tensor({2, 3, 4}))
                        .with("mat2", tensor({2, 4, 5}))
                        .gives(std::vector<int64_t>{2, 3, 5});
  EXPECT_TRUE(has_row(call, "S0 <- S0 S0"));
  EXPECT_TRUE(has_row(call, "P(sum) <- S2 S1"));
}

TEST(MatrixRules, ALayerKeepsTheBatchDimsOfItsInput) {
  const auto call = CallOf("aten::linear")
                        .with("input", tensor({2, 3, 4}))
                        .with("weight", tensor({5, 4}))
                        .with("bias", tensor({5}))
                        .gives(std::vector<int64_t>{2, 3, 5});
  EXPECT_TRUE(has_row(call, "S1 <- S1 R R"));
  EXPECT_TRUE(has_row(call, "S2 <- R S0 S0"));
  EXPECT_TRUE(has_row(call, "P(sum) <- S2 S1 P(sum)"));
}

OpCall scaled_mm(const std::vector<int64_t>& scale_a, const std::vector<int64_t>& scale_b) {
  return CallOf("aten::_scaled_mm")
      .with("self", tensor({512, 256}, Dtype::kFloat8E4M3))
      .with("mat2", tensor({256, 1024}, Dtype::kFloat8E4M3))
      .with("scale_a", tensor(scale_a))
      .with("scale_b", tensor(scale_b))
      .with_none("bias")
      .with_none("scale_result")
      .gives({tensor({512, 1024}, Dtype::kBFloat16)});
}

TEST(ScaledMatrixRules, AScaleOfRowsIsCutWithThem) {
  const auto call = scaled_mm({512, 1}, {1, 1024});
  EXPECT_TRUE(has_row(call, "S0 <- S0 R S0 R"));
  EXPECT_TRUE(has_row(call, "S1 <- R S1 R S1"));
  EXPECT_TRUE(has_row(call, "P(sum) <- S1 S0 R R"));
}

TEST(ScaledMatrixRules, OneScaleIsWhole) { EXPECT_TRUE(has_row(scaled_mm({}, {}), "S0 <- S0 R R R")); }

TEST(ScaledMatrixRules, BlocksOfAScaleStayWithTheirElements) {
  const auto call = scaled_mm({512, 2}, {2, 8});
  const std::vector<std::string> inputs{"S1", "S0", "S1", "S0"};
  EXPECT_TRUE(is_legal(call, {"P"}, inputs, {{2}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"P"}, inputs, {{3}, {}, {}}));
}

TEST(ScaledMatrixRules, TilesStayWithTheirRows) {
  const auto call = scaled_mm({4096}, {8192});
  EXPECT_TRUE(is_legal(call, {"S0"}, {"S0", "R", "S0", "R"}, {{4}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"S0"}, {"S0", "R", "S0", "R"}, {{8}, {}, {}}));
}

OpCall grouped_mm(const Shape& self, const Shape& mat2, const Shape& result) {
  return CallOf("aten::_grouped_mm")
      .with("self", tensor(self))
      .with("mat2", tensor(mat2))
      .with("offs", tensor({2}, Dtype::kInt32))
      .with_none("bias")
      .gives(result);
}

TEST(GroupedMatrixRules, RowsOfGroupsAreWhole) {
  EXPECT_EQ(texts_of(grouped_mm({16, 8}, {2, 8, 12}, {16, 12})),
            (Texts{"S1 <- R S2 R", "P(sum) <- S1 S1 R", "P(sum) <- P(sum) R R", "P(sum) <- R P(sum) R",
                   "P(avg) <- P(avg) R R", "P(avg) <- R P(avg) R"}));
}

TEST(GroupedMatrixRules, ColumnsOfGroupsAreWhole) {
  const auto texts = texts_of(grouped_mm({2, 16, 8}, {8, 12}, {16, 12}));
  EXPECT_EQ(Texts(texts.begin(), texts.begin() + 2), (Texts{"S0 <- S1 R R", "P(sum) <- S2 S0 R"}));
}

TEST(GroupedMatrixRules, WhatGroupsAddUpOverIsWhole) {
  const auto call = grouped_mm({16, 8}, {8, 12}, {2, 16, 12});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S1 <- S0 R R", "S2 <- R S1 R"}));
  EXPECT_FALSE(has_row(call, "P(sum) <- S1 S0 R"));
}

TEST(GroupedMatrixRules, ABatchIsCutInAll) {
  EXPECT_EQ(shard_rows_of(grouped_mm({2, 16, 8}, {2, 8, 12}, {2, 16, 12})),
            (Texts{"S0 <- S0 S0 R", "S1 <- S1 R R", "S2 <- R S2 R"}));
}

TEST(GroupedMatrixRules, PiecesOfRowsEndWhereSixteenBytesDo) {
  const auto call = grouped_mm({16, 8}, {2, 8, 12}, {16, 12});
  EXPECT_TRUE(is_legal(call, {"S1"}, {"R", "S2", "R"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"S1"}, {"R", "S2", "R"}, {{2}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"P"}, {"S1", "S1", "R"}, {{4}, {}, {}}));
}

TEST(GroupedMatrixRules, PiecesOfColumnsDoWhereColumnsAreDense) {
  auto call = grouped_mm({16, 8}, {2, 8, 12}, {16, 12});
  call.tensors[1].stride = {96, 1, 8};
  EXPECT_TRUE(is_legal(call, {"S1"}, {"R", "S2", "R"}, {{2}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"P"}, {"R", "S1", "R"}, {{4}, {}, {}}));
}

class ProductOfMatrices : public ::testing::TestWithParam<std::array<int64_t, 3>> {};

TEST_P(ProductOfMatrices, OfPartsIsThePartOfTheWhole) {
  const auto [m, k, n] = GetParam();
  const auto op = [](const std::vector<Numbers>& inputs, const std::vector<int64_t>&) {
    const int64_t rows = inputs[0].shape[0];
    const int64_t summed = inputs[0].shape[1];
    const int64_t columns = inputs[1].shape[1];
    Numbers output{{rows, columns}, std::vector<double>(rows * columns)};
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        for (int64_t s = 0; s < summed; ++s) {
          output.values[i * columns + j] +=
              inputs[0].values.at(i * summed + s) * inputs[1].values.at(s * columns + j);
        }
      }
    }
    return output;
  };
  EXPECT_TRUE(all_rows_are_right(mm(m, k, n), op));
}

INSTANTIATE_TEST_SUITE_P(Sizes, ProductOfMatrices,
                         Values(std::array<int64_t, 3>{6, 12, 6}, std::array<int64_t, 3>{5, 7, 3},
                                std::array<int64_t, 3>{1, 2, 1}, std::array<int64_t, 3>{4, 0, 2}));

}  // namespace
}  // namespace funcol::test::matrix_test
