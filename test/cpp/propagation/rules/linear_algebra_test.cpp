#include <gtest/gtest.h>

#include "propagation/rules/calls.h"

namespace funcol::test::linear_algebra_test {
namespace {

TEST(LinearAlgebraRules, MatricesOfABatchAreByThemselves) {
  const auto call = CallOf("aten::_linalg_det")
                        .with("A", tensor({2, 5, 4, 4}))
                        .gives({tensor({2, 5}), tensor({2, 5, 4, 4}), tensor({2, 5, 4})});
  EXPECT_EQ(texts_of(call), (Texts{"S0 S0 S0 <- S0", "S1 S1 S1 <- S1"}));
}

TEST(LinearAlgebraRules, AMatrixAloneIsWhole) {
  const auto call =
      CallOf("aten::linalg_qr").with("A", tensor({4, 4})).gives({tensor({4, 4}), tensor({4, 4})});
  EXPECT_TRUE(texts_of(call).empty());
}

TEST(LinearAlgebraRules, WhatIsNotComputedHasNoBatch) {
  const auto call = CallOf("aten::_linalg_svd")
                        .with("A", tensor({2, 4, 4}))
                        .gives({tensor({0}), tensor({2, 4}), tensor({0})});
  EXPECT_EQ(texts_of(call), Texts{"R S0 R <- S0"});
}

OpCall solve_triangular(const Shape& a, const Shape& b) {
  return CallOf("aten::linalg_solve_triangular").with("self", tensor(a)).with("B", tensor(b)).gives(b);
}

TEST(LinearAlgebraRules, SolutionsAreLinearInTheRightHandSide) {
  EXPECT_TRUE(has_row(solve_triangular({4, 4}, {4, 3}), "P(sum) <- R P(sum)"));
}

TEST(LinearAlgebraRules, BroadcastBatchesAreWhole) {
  EXPECT_EQ(shard_rows_of(solve_triangular({2, 4, 4}, {2, 4, 3})), Texts{"S0 <- S0 S0"});
  EXPECT_EQ(shard_rows_of(solve_triangular({2, 4, 4}, {2, 2, 4, 3})), Texts{"S0 <- R S0"});
  EXPECT_EQ(shard_rows_of(solve_triangular({1, 4, 4}, {2, 4, 3})), Texts{"S0 <- R S0"});
}

OpCall solve(const Shape& a, const Shape& b) {
  return CallOf("aten::_linalg_solve_ex")
      .with("A", tensor(a))
      .with("B", tensor(b))
      .gives({tensor(b), tensor(a), tensor({2, 4}), tensor({2})});
}

TEST(LinearAlgebraRules, RightHandSidesMayBeVectors) {
  EXPECT_EQ(shard_rows_of(solve({2, 4, 4}, {2, 4})), Texts{"S0 S0 S0 S0 <- S0 S0"});
  EXPECT_TRUE(has_row(solve({2, 4, 4}, {2, 4}), "P(sum) R R R <- R P(sum)"));
}

TEST(LinearAlgebraRules, PivotsLackADim) {
  const auto call = CallOf("aten::linalg_lu_solve")
                        .with("LU", tensor({2, 4, 4}))
                        .with("pivots", tensor({2, 4}, Dtype::kInt32))
                        .with("B", tensor({2, 4, 3}))
                        .gives(Shape{2, 4, 3});
  EXPECT_EQ(shard_rows_of(call), Texts{"S0 <- S0 S0 S0"});
}

TEST(RandomRules, SamplesAreDrawnForTheWholeTensor) {
  const auto call = CallOf("aten::multinomial")
                        .with("self", tensor({5, 4}))
                        .with("num_samples", int64_t{3})
                        .gives(Shape{5, 3});
  EXPECT_EQ(texts_of(call), Texts{});
}

TEST(RandomRules, NumbersAreDrawnForParts) {
  const auto call = CallOf("aten::native_dropout")
                        .with("input", tensor({5, 4}))
                        .gives({tensor({5, 4}), tensor({5, 4}, Dtype::kBool)});
  EXPECT_EQ(texts_of(call), (Texts{"S0 S0 <- S0", "S1 S1 <- S1"}));
}

}  // namespace
}  // namespace funcol::test::linear_algebra_test
