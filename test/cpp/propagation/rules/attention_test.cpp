#include <gtest/gtest.h>

#include "propagation/rules/calls.h"

namespace funcol::test::attention_test {
namespace {

OpCall flash_attention(int64_t num_keys) {
  return CallOf("aten::_scaled_dot_product_flash_attention")
      .with("query", tensor({2, 6, 5, 8}))
      .with("key", tensor({2, num_keys, 5, 8}))
      .with("value", tensor({2, num_keys, 5, 8}))
      .with("return_debug_mask", false)
      .gives({tensor({2, 6, 5, 8}), tensor({2, 6, 5}), std::nullopt, std::nullopt, std::nullopt, std::nullopt,
              tensor({2}), tensor({}), tensor({0})});
}

TEST(AttentionRules, SequencesAndHeadsAreByThemselves) {
  EXPECT_EQ(texts_of(flash_attention(6)),
            (Texts{"S0 S0 - - - - R R R <- S0 S0 S0", "S1 S1 - - - - R R R <- S1 S1 S1"}));
}

TEST(AttentionRules, QueriesStayWithTheKeysThatTheyShare) {
  const auto call = flash_attention(3);
  const Texts heads{"S1", "S1", "", "", "", "", "R", "R", "R"};
  EXPECT_TRUE(is_legal(call, heads, {"S1", "S1", "S1"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, heads, {"S1", "S1", "S1"}, {{2}, {}, {}}));
}

TEST(AttentionRules, UnevenHeadsAreCutWhereEachHasItsKey) {
  EXPECT_TRUE(is_legal(flash_attention(6), {"S1", "S1", "", "", "", "", "R", "R", "R"}, {"S1", "S1", "S1"},
                       {{4}, {}, {}}));
}

TEST(AttentionRules, AMaskForAllSequencesIsWholeThere) {
  const auto call = CallOf("aten::_scaled_dot_product_flash_attention_for_cpu")
                        .with("query", tensor({2, 6, 5, 8}))
                        .with("key", tensor({2, 6, 5, 8}))
                        .with("value", tensor({2, 6, 5, 8}))
                        .with("attn_mask", tensor({1, 6, 5, 5}))
                        .gives({tensor({2, 6, 5, 8}), tensor({2, 6, 5})});
  EXPECT_EQ(texts_of(call), (Texts{"S0 S0 <- S0 S0 S0 R", "S1 S1 <- S1 S1 S1 S1"}));
}

TEST(AttentionRules, AMaskOfScoresAloneIsWhole) {
  const auto call = CallOf("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
                        .with("grad_out", tensor({2, 6, 5, 8}))
                        .with("query", tensor({2, 6, 5, 8}))
                        .with("key", tensor({2, 6, 5, 8}))
                        .with("value", tensor({2, 6, 5, 8}))
                        .with("out", tensor({2, 6, 5, 8}))
                        .with("logsumexp", tensor({2, 6, 5}))
                        .with("attn_mask", tensor({5, 5}))
                        .gives({tensor({2, 6, 5, 8}), tensor({2, 6, 5, 8}), tensor({2, 6, 5, 8})});
  EXPECT_EQ(texts_of(call), (Texts{"S0 S0 S0 <- S0 S0 S0 S0 S0 S0 R", "S1 S1 S1 <- S1 S1 S1 S1 S1 S1 R"}));
}

TEST(AttentionRules, GradientsOfABiasAddUpWhereItIsBroadcast) {
  const auto call =
      CallOf("aten::_scaled_dot_product_efficient_attention_backward")
          .with("grad_out_", tensor({2, 6, 5, 8}))
          .with("query", tensor({2, 6, 5, 8}))
          .with("key", tensor({2, 6, 5, 8}))
          .with("value", tensor({2, 6, 5, 8}))
          .with("attn_bias", tensor({1, 6, 5, 5}))
          .with("out", tensor({2, 6, 5, 8}))
          .with("logsumexp", tensor({2, 6, 5}))
          .with("philox_seed", tensor({}))
          .with("philox_offset", tensor({}))
          .gives({tensor({2, 6, 5, 8}), tensor({2, 6, 5, 8}), tensor({2, 6, 5, 8}), tensor({1, 6, 5, 5})});
  EXPECT_EQ(texts_of(call),
            (Texts{"S0 S0 S0 P(sum) <- S0 S0 S0 S0 R S0 S0 R R", "S1 S1 S1 S1 <- S1 S1 S1 S1 S1 S1 S1 R R"}));
}

}  // namespace
}  // namespace funcol::test::attention_test
