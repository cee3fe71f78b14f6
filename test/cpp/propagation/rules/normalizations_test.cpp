#include <gtest/gtest.h>

#include "propagation/rules/calls.h"

namespace funcol::test::normalizations_test {
namespace {

TEST(NormalizationRules, ALayerIsCutWhereItDoesNotNormalize) {
  const auto call = CallOf("aten::native_layer_norm")
                        .with("input", tensor({2, 3, 4}))
                        .with("normalized_shape", integers({4}))
                        .with("weight", tensor({4}))
                        .with_none("bias")
                        .gives({tensor({2, 3, 4}), tensor({2, 3, 1}), tensor({2, 3, 1})});
  EXPECT_EQ(texts_of(call), (Texts{"S0 S0 S0 <- S0 R", "S1 S1 S1 <- S1 R"}));
}

TEST(NormalizationRules, GradientsOfWeightsAddUp) {
  const auto call = CallOf("aten::native_layer_norm_backward")
                        .with("grad_out", tensor({2, 4}))
                        .with("input", tensor({2, 4}))
                        .with("normalized_shape", integers({4}))
                        .with("mean", tensor({2, 1}))
                        .with("rstd", tensor({2, 1}))
                        .with("weight", tensor({4}))
                        .with("bias", tensor({4}))
                        .gives({tensor({2, 4}), std::nullopt, tensor({4})});
  EXPECT_EQ(texts_of(call), (Texts{"S0 - P(sum) <- S0 S0 S0 S0 R R", "P(sum) - P(sum) <- P(sum) R R R R R",
                                   "P(avg) - P(avg) <- P(avg) R R R R R"}));
}

TEST(NormalizationRules, AGroupIsCutByImages) {
  const auto call = CallOf("aten::native_group_norm")
                        .with("input", tensor({2, 6, 5}))
                        .with("weight", tensor({6}))
                        .with("bias", tensor({6}))
                        .gives({tensor({2, 6, 5}), tensor({2, 3}), tensor({2, 3})});
  EXPECT_EQ(texts_of(call), Texts{"S0 S0 S0 <- S0 R R"});
}

OpCall batch_norm(bool training) {
  return CallOf("aten::native_batch_norm")
      .with("input", tensor({2, 6, 5}))
      .with("weight", tensor({6}))
      .with_none("bias")
      .with("running_mean", tensor({6}))
      .with("running_var", tensor({6}))
      .with("training", training)
      .gives({tensor({2, 6, 5}), tensor({training ? 6 : 0}), tensor({training ? 6 : 0})});
}

TEST(NormalizationRules, StatisticsOfABatchAreCutByChannels) {
  EXPECT_EQ(texts_of(batch_norm(true)), Texts{"S1 S0 S0 <- S1 S0 S0 S0"});
}

TEST(NormalizationRules, GivenStatisticsServeAnyPart) {
  EXPECT_EQ(texts_of(batch_norm(false)),
            (Texts{"S1 R R <- S1 S0 S0 S0", "S0 R R <- S0 R R R", "S2 R R <- S2 R R R"}));
}

TEST(NormalizationRules, AWorkspaceHasNoChannels) {
  const auto call = CallOf("aten::_batch_norm_with_update")
                        .with("input", tensor({2, 6}))
                        .with("running_mean", tensor({6}))
                        .with("running_var", tensor({6}))
                        .gives({tensor({2, 6}), tensor({6}), tensor({6}), tensor({6}, Dtype::kUInt8)});
  EXPECT_EQ(texts_of(call), Texts{"S1 S0 S0 R <- S1 S0 S0"});
}

OpCall nll_loss(int64_t reduction) {
  return CallOf("aten::nll_loss2d_forward")
      .with("self", tensor({2, 3, 4, 5}))
      .with("target", tensor({2, 4, 5}, Dtype::kInt64))
      .with("weight", tensor({3}))
      .with("reduction", reduction)
      .gives({reduction == 0 ? tensor({2, 4, 5}) : tensor({}), tensor({})});
}

TEST(LossRules, TheTargetLacksTheClasses) {
  EXPECT_EQ(texts_of(nll_loss(0)), (Texts{"S0 R <- S0 S0 R", "S1 R <- S2 S1 R", "S2 R <- S3 S2 R"}));
}

TEST(LossRules, SumsOfALossArePending) { EXPECT_TRUE(has_row(nll_loss(2), "P(sum) P(sum) <- S2 S1 R")); }

TEST(LossRules, MeansOfALossDependOnAllWeights) { EXPECT_TRUE(texts_of(nll_loss(1)).empty()); }

OpCall nll_loss_backward(int64_t reduction) {
  return CallOf("aten::nll_loss_backward")
      .with("grad_output", reduction == 0 ? tensor({4}) : tensor({}))
      .with("self", tensor({4, 3}))
      .with("target", tensor({4}, Dtype::kInt64))
      .with_none("weight")
      .with("reduction", reduction)
      .with("total_weight", tensor({}))
      .gives({4, 3});
}

TEST(LossRules, TheTotalWeightMayPendWhereItIsNotRead) {
  EXPECT_TRUE(has_row(nll_loss_backward(2), "S0 <- R S0 S0 P(sum)"));
  EXPECT_TRUE(has_row(nll_loss_backward(0), "S0 <- S0 S0 S0 P(sum)"));
  EXPECT_FALSE(has_row(nll_loss_backward(1), "S0 <- R S0 S0 P(sum)"));
  EXPECT_TRUE(has_row(nll_loss_backward(1), "S0 <- R S0 S0 R"));
}

}  // namespace
}  // namespace funcol::test::normalizations_test
