#include <gtest/gtest.h>

#include "propagation/rules/calls.h"

namespace funcol::test::images_test {
namespace {

OpCall convolution(int64_t stride, int64_t padding) {
  return CallOf("aten::convolution")
      .with("input", tensor({4, 3, 12, 12}))
      .with("weight", tensor({8, 3, 2, 2}))
      .with("bias", tensor({8}))
      .with("stride", integers({stride, stride}))
      .with("padding", integers({padding, padding}))
      .with("dilation", integers({1, 1}))
      .with("transposed", false)
      .gives(Shape{4, 8, 6, 6});
}

TEST(ConvolutionRules, ImagesAreByThemselves) {
  EXPECT_EQ(shard_rows_of(convolution(1, 1)), Texts{"S0 <- S0 R R"});
}

TEST(ConvolutionRules, WindowsSideBySideAreByThemselves) {
  const auto call = convolution(2, 0);
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0 R R", "S3 <- S3 R R"}));
  EXPECT_TRUE(is_legal(call, {"S3"}, {"S3", "R", "R"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"S3"}, {"S3", "R", "R"}, {{4}, {}, {}}));
}

TEST(ConvolutionRules, ASumTakesItsBiasInParts) {
  EXPECT_TRUE(has_row(convolution(1, 1), "P(sum) <- P(sum) R P(sum)"));
}

TEST(ConvolutionRules, GradientsOfWeightsAddUpOverImages) {
  const auto call = CallOf("aten::convolution_backward")
                        .with("grad_output", tensor({4, 8, 6, 6}))
                        .with("input", tensor({4, 3, 12, 12}))
                        .with("weight", tensor({8, 3, 2, 2}))
                        .with("stride", integers({1, 1}))
                        .with("padding", integers({1, 1}))
                        .with("dilation", integers({1, 1}))
                        .with("transposed", false)
                        .gives({tensor({4, 3, 12, 12}), tensor({8, 3, 2, 2}), std::nullopt});
  EXPECT_TRUE(has_row(call, "S0 P(sum) - <- S0 S0 R"));
}

OpCall avg_pool(const Shape& shape) {
  return CallOf("aten::avg_pool2d").with("self", tensor(shape)).gives(shape);
}

TEST(PoolingRules, ChannelsAreByThemselves) {
  EXPECT_EQ(texts_of(avg_pool({2, 3, 4, 4})),
            (Texts{"S0 <- S0", "S1 <- S1", "P(sum) <- P(sum)", "P(avg) <- P(avg)"}));
}

TEST(PoolingRules, AnImageAloneHasNoBatch) {
  EXPECT_EQ(shard_rows_of(avg_pool({3, 4, 4})), Texts{"S0 <- S0"});
}

TEST(PoolingRules, NoRankIsLeftWithoutChannels) {
  const auto call = avg_pool({2, 3, 4, 4});
  EXPECT_TRUE(is_legal(call, {"S0"}, {"S0"}, {{4}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"S1"}, {"S1"}, {{4}, {}, {}}));
}

TEST(PoolingRules, NumbersDrawnForOneImageAreNotCut) {
  const auto call = CallOf("aten::fractional_max_pool2d")
                        .with("self", tensor({3, 4, 4}))
                        .with("random_samples", tensor({1, 3, 2}))
                        .gives({tensor({3, 2, 2}), tensor({3, 2, 2}, Dtype::kInt64)});
  EXPECT_TRUE(texts_of(call).empty());
}

TEST(PoolingRules, GradientsArePendingAsWhatComesBack) {
  const auto call = CallOf("aten::max_pool2d_with_indices_backward")
                        .with("grad_output", tensor({2, 3, 2, 2}))
                        .with("self", tensor({2, 3, 4, 4}))
                        .with("indices", tensor({2, 3, 2, 2}, Dtype::kInt64))
                        .gives(Shape{2, 3, 4, 4});
  EXPECT_TRUE(has_row(call, "S1 <- S1 S1 S1"));
  EXPECT_TRUE(has_row(call, "P(sum) <- P(sum) R R"));
}

TEST(PoolingRules, UpsamplingIsLinear) {
  const auto call =
      CallOf("aten::upsample_bilinear2d").with("self", tensor({2, 3, 4, 4})).gives(Shape{2, 3, 8, 8});
  EXPECT_EQ(texts_of(call), (Texts{"S0 <- S0", "S1 <- S1", "P(sum) <- P(sum)", "P(avg) <- P(avg)"}));
}

TEST(PoolingRules, AGridHasNoChannels) {
  const auto call = CallOf("aten::grid_sampler_2d")
                        .with("input", tensor({2, 3, 4, 4}))
                        .with("grid", tensor({2, 5, 5, 2}))
                        .gives(Shape{2, 3, 5, 5});
  EXPECT_EQ(shard_rows_of(call), Texts{"S0 <- S0 S0"});
  EXPECT_TRUE(has_row(call, "P(sum) <- P(sum) R"));
}

}  // namespace
}  // namespace funcol::test::images_test
