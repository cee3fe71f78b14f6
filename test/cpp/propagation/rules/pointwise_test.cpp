#include <gtest/gtest.h>

#include <limits>

#include "propagation/rules/cut_and_run.h"

namespace funcol::test::pointwise_test {
namespace {

using ::testing::Values;

OpCall binary(const std::string& op, const std::vector<int64_t>& self, const std::vector<int64_t>& other,
              const std::vector<int64_t>& output, Dtype dtype = Dtype::kFloat32) {
  return CallOf(op)
      .with("self", tensor(self, dtype))
      .with("other", tensor(other, dtype))
      .with("alpha", int64_t{1})
      .gives({tensor(output, dtype)});
}

OpCall unary(const std::string& op, Dtype dtype = Dtype::kFloat32) {
  return CallOf(op).with("self", tensor({4, 3}, dtype)).gives({tensor({4, 3}, dtype)});
}

TEST(PointwiseRules, BroadcastingReplicatesWhatIsRepeated) {
  EXPECT_EQ(shard_rows_of(binary("aten::mul.Tensor", {5, 1, 3}, {4, 3}, {5, 4, 3})),
            (std::vector<std::string>{"S0 <- S0 R", "S1 <- R S0", "S2 <- S2 S1"}));
}

TEST(PointwiseRules, ADimOfOneElementIsCutInAllOperands) {
  EXPECT_EQ(shard_rows_of(binary("aten::mul.Tensor", {1, 3}, {1, 3}, {1, 3})),
            (std::vector<std::string>{"S0 <- S0 S0", "S1 <- S1 S1"}));
}

TEST(PointwiseRules, SumsOfBothAddUpToTheSumOfAll) {
  EXPECT_TRUE(has_row(binary("aten::add.Tensor", {4}, {4}, {4}), "P(sum) <- P(sum) P(sum)"));
}

TEST(PointwiseRules, AWholeIsNotAddedOnEveryRank) {
  EXPECT_FALSE(has_row(binary("aten::add.Tensor", {4}, {4}, {4}), "P(sum) <- P(sum) R"));
}

TEST(PointwiseRules, SubtractingAMaximumGivesAMinimum) {
  EXPECT_TRUE(has_row(binary("aten::sub.Tensor", {4}, {4}, {4}), "P(min) <- R P(max)"));
}

TEST(PointwiseRules, ANegativeAlphaTurnsExtremesAround) {
  const auto call = CallOf("aten::add.Tensor")
                        .with("self", tensor({4}))
                        .with("other", tensor({4}))
                        .with("alpha", Argument{-2.0})
                        .gives(std::vector<int64_t>{4});
  EXPECT_TRUE(has_row(call, "P(min) <- R P(max)"));
}

TEST(PointwiseRules, UnsignedDifferencesKeepNoOrder) {
  EXPECT_FALSE(has_row(binary("aten::sub.Tensor", {4}, {4}, {4}, Dtype::kUInt8), "P(max) <- P(max) R"));
}

TEST(PointwiseRules, BoolsDoNotAddUp) {
  EXPECT_FALSE(has_row(binary("aten::add.Tensor", {4}, {4}, {4}, Dtype::kBool), "P(sum) <- P(sum) P(sum)"));
}

TEST(PointwiseRules, IntegersAreNotAveraged) {
  EXPECT_FALSE(has_row(binary("aten::mul.Tensor", {4}, {4}, {4}, Dtype::kInt64), "P(avg) <- P(avg) R"));
}

TEST(PointwiseRules, DivisionThatRoundsIsNotLinear) {
  const auto call = CallOf("aten::div.Tensor_mode")
                        .with("self", tensor({4}))
                        .with("other", tensor({4}))
                        .with("rounding_mode", Argument{std::string("floor")})
                        .gives(std::vector<int64_t>{4});
  EXPECT_FALSE(has_row(call, "P(sum) <- P(sum) R"));
}

OpCall with_number(const std::string& op, double other) {
  return CallOf(op).with("self", tensor({4})).with("other", Argument{other}).gives(std::vector<int64_t>{4});
}

TEST(PointwiseRules, DivisionByANumberIsLinear) {
  EXPECT_TRUE(has_row(with_number("aten::div.Tensor", 2), "P(sum) <- P(sum)"));
}

TEST(PointwiseRules, PartsAreNotDividedByZero) {
  EXPECT_FALSE(has_row(with_number("aten::div.Tensor", 0), "P(sum) <- P(sum)"));
  EXPECT_FALSE(has_row(with_number("aten::div.Tensor", -0.0), "P(max) <- P(min)"));
}

TEST(PointwiseRules, PartsAreNotMultipliedByInfinity) {
  EXPECT_FALSE(
      has_row(with_number("aten::mul.Tensor", std::numeric_limits<double>::infinity()), "P(sum) <- P(sum)"));
}

TEST(PointwiseRules, ABufferThatIsEmptyIsOnEveryRank) {
  const auto call = CallOf("aten::log_sigmoid_backward")
                        .with("grad_output", tensor({4}))
                        .with("self", tensor({4}))
                        .with("buffer", tensor({0}))
                        .gives(std::vector<int64_t>{4});
  EXPECT_TRUE(has_row(call, "S0 <- S0 S0 R"));
}

TEST(PointwiseRules, AConstantTimesIsLinear) {
  const auto call = CallOf("aten::_foreach_mul_.Scalar")
                        .with("self", tensor({4}))
                        .with("scalar", Argument{-2.0})
                        .gives(std::vector<int64_t>{4});
  EXPECT_EQ(texts_of(call), (std::vector<std::string>{"S0 <- S0", "P(sum) <- P(sum)", "P(avg) <- P(avg)",
                                                      "P(min) <- P(max)", "P(max) <- P(min)"}));
}

TEST(PointwiseRules, AThresholdBelowItsValueIsNotIncreasing) {
  const auto call = CallOf("aten::threshold")
                        .with("self", tensor({4}))
                        .with("threshold", int64_t{1})
                        .with("value", int64_t{20})
                        .gives(std::vector<int64_t>{4});
  EXPECT_FALSE(has_row(call, "P(max) <- P(max)"));
}

TEST(PointwiseRules, GradientsOfActivationsAreLinearInWhatComesBack) {
  const auto call = CallOf("aten::gelu_backward")
                        .with("grad_output", tensor({4}))
                        .with("self", tensor({4}))
                        .gives(std::vector<int64_t>{4});
  EXPECT_TRUE(has_row(call, "P(sum) <- P(sum) R"));
}

TEST(PointwiseRules, AChoiceBetweenPendingTensorsIsPending) {
  const auto call = CallOf("aten::where.self")
                        .with("condition", tensor({4}, Dtype::kBool))
                        .with("self", tensor({4}))
                        .with("other", tensor({4}))
                        .gives(std::vector<int64_t>{4});
  EXPECT_TRUE(has_row(call, "P(sum) <- R P(sum) P(sum)"));
}

TEST(PointwiseRules, OnlyZerosAreFilledIntoSums) {
  const auto filled_with = [](int64_t value) {
    return CallOf("aten::masked_fill.Scalar")
        .with("self", tensor({4}))
        .with("mask", tensor({4}, Dtype::kBool))
        .with("value", value)
        .gives(std::vector<int64_t>{4});
  };
  EXPECT_TRUE(has_row(filled_with(0), "P(sum) <- P(sum) R"));
  EXPECT_FALSE(has_row(filled_with(1), "P(sum) <- P(sum) R"));
}

TEST(PointwiseRules, ALearningRateIsOnEveryRank) {
  const auto call = CallOf("aten::_fused_adam_.tensor_lr")
                        .with("self", tensor({4, 3}))
                        .with("grads", tensor({4, 3}))
                        .with("exp_avgs", tensor({4, 3}))
                        .with("exp_avg_sqs", tensor({4, 3}))
                        .with_none("max_exp_avg_sqs")
                        .with("state_steps", tensor({}))
                        .with("lr", tensor({}))
                        .gives({tensor({4, 3}), tensor({4, 3}), tensor({4, 3}), tensor({4, 3})});
  EXPECT_EQ(texts_of(call),
            (std::vector<std::string>{"S0 S0 S0 S0 <- S0 S0 S0 S0 R R", "S1 S1 S1 S1 <- S1 S1 S1 S1 R R"}));
}

TEST(CopyRules, ACopyIsPendingAsItsSourceIs) {
  const auto call =
      CallOf("aten::copy_").with("self", tensor({4})).with("src", tensor({4})).gives(std::vector<int64_t>{4});
  EXPECT_TRUE(has_row(call, "P(sum) <- P(sum) P(sum)"));
}

TEST(CopyRules, RoundingToIntegersDoesNotAddUp) {
  const auto call = CallOf("aten::_to_copy").with("self", tensor({4})).gives({tensor({4}, Dtype::kInt64)});
  EXPECT_FALSE(has_row(call, "P(sum) <- P(sum)"));
  EXPECT_FALSE(has_row(call, "P(max) <- P(max)"));  // of what does not fit
}

TEST(CopyRules, ExtremesAreKeptByIntegersThatFit) {
  const auto cast = [](Dtype from, Dtype to) {
    return CallOf("aten::_to_copy").with("self", tensor({4}, from)).gives({tensor({4}, to)});
  };
  EXPECT_TRUE(has_row(cast(Dtype::kInt32, Dtype::kInt64), "P(max) <- P(max)"));
  EXPECT_TRUE(has_row(cast(Dtype::kUInt8, Dtype::kInt16), "P(max) <- P(max)"));
  EXPECT_FALSE(has_row(cast(Dtype::kInt8, Dtype::kUInt16), "P(max) <- P(max)"));
  EXPECT_FALSE(has_row(cast(Dtype::kInt64, Dtype::kInt32), "P(max) <- P(max)"));
}

TEST(CopyRules, WhatIsMadeAlikeIsWholeWhereItsModelIsPending) {
  EXPECT_TRUE(has_row(unary("aten::ones_like"), "R <- P(sum)"));
  EXPECT_FALSE(has_row(unary("aten::ones_like"), "P(sum) <- P(sum)"));
}

TEST(CopyRules, ANewTensorOfAnotherShapeIsWhole) {
  const auto call = CallOf("aten::new_zeros")
                        .with("self", tensor({4}))
                        .with("size", integers({6}))
                        .gives(std::vector<int64_t>{6});
  EXPECT_EQ(shard_rows_of(call), (std::vector<std::string>{"R <- S0"}));
}

TEST(CopyRules, BytesOfPendingNumbersAreNotPending) {
  const auto call = CallOf("aten::view.dtype").with("self", tensor({4})).gives({tensor({4}, Dtype::kInt32)});
  EXPECT_EQ(texts_of(call), (std::vector<std::string>{"S0 <- S0"}));
}

TEST(CopyRules, BytesOfWholeElementsStayTogether) {
  const auto call =
      CallOf("aten::view.dtype").with("self", tensor({6}, Dtype::kFloat64)).gives({tensor({12})});
  EXPECT_TRUE(is_legal(call, {"S0"}, {"S0"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"S0"}, {"S0"}, {{4}, {}, {}}));
}

// Operators of two tensors, with the function of two numbers that they compute.
struct Arithmetic {
  std::string op;
  double (*of)(double, double);
};

class PointwiseArithmetic : public ::testing::TestWithParam<Arithmetic> {
 protected:
  Numbers run(const std::vector<Numbers>& inputs, const std::vector<int64_t>& shape) const {
    Numbers output{shape, {}};
    for (int64_t element = 0; element < num_elements(shape); ++element) {
      const auto index = index_of(element, shape);
      std::vector<double> operands;
      for (const auto& input : inputs) {
        std::vector<int64_t> own(index.end() - static_cast<int64_t>(input.shape.size()), index.end());
        for (size_t dim = 0; dim < own.size(); ++dim) {
          own[dim] = input.shape[dim] == 1 ? 0 : own[dim];
        }
        operands.push_back(input.values.at(element_at(own, input.shape)));
      }
      output.values.push_back(GetParam().of(operands.at(0), operands.at(1)));
    }
    return output;
  }

  ::testing::AssertionResult is_right_on_parts(const Shape& self, const Shape& other,
                                               const Shape& output) const {
    const auto op = [this](const auto& inputs, const auto& shape) { return run(inputs, shape); };
    return all_rows_are_right(binary(GetParam().op, self, other, output), op);
  }
};

TEST_P(PointwiseArithmetic, OfPartsIsThePartOfTheWhole) {
  EXPECT_TRUE(is_right_on_parts({6, 4}, {6, 4}, {6, 4}));
}
TEST_P(PointwiseArithmetic, OfUnevenPartsIsThePartOfTheWhole) {
  EXPECT_TRUE(is_right_on_parts({5, 1}, {5, 7}, {5, 7}));
}
TEST_P(PointwiseArithmetic, OfEmptyPartsIsThePartOfTheWhole) {
  EXPECT_TRUE(is_right_on_parts({1, 0}, {2, 1}, {2, 0}));
}

INSTANTIATE_TEST_SUITE_P(
    All, PointwiseArithmetic,
    Values(Arithmetic{"aten::add.Tensor", [](double a, double b) { return a + b; }},
           Arithmetic{"aten::sub.Tensor", [](double a, double b) { return a - b; }},
           Arithmetic{"aten::rsub.Tensor", [](double a, double b) { return b - a; }},
           Arithmetic{"aten::mul.Tensor", [](double a, double b) { return a * b; }},
           Arithmetic{"aten::maximum", [](double a, double b) { return std::max(a, b); }},
           Arithmetic{"aten::minimum", [](double a, double b) { return std::min(a, b); }},
           Arithmetic{"aten::bitwise_and.Tensor",
                      [](double a, double b) { return a > 0 && b > 0 ? 1.0 : 0.0; }}),
    [](const auto& param) {
      const auto& op = param.param.op;
      return op.substr(6, op.find('.') == std::string::npos ? op.npos : op.find('.') - 6);
    });

// Operators of one tensor, with the function of a number that they compute.
struct Function {
  std::string op;
  double (*of)(double);
};

class PointwiseFunction : public ::testing::TestWithParam<Function> {};

TEST_P(PointwiseFunction, OfPartsIsThePartOfTheWhole) {
  const auto op = [](const std::vector<Numbers>& inputs, const std::vector<int64_t>&) {
    Numbers output = inputs.at(0);
    for (auto& value : output.values) {
      value = GetParam().of(value);
    }
    return output;
  };
  EXPECT_TRUE(all_rows_are_right(unary(GetParam().op), op));
}

INSTANTIATE_TEST_SUITE_P(All, PointwiseFunction,
                         Values(Function{"aten::neg", [](double x) { return -x; }},
                                Function{"aten::relu", [](double x) { return std::max(x, 0.0); }},
                                Function{"aten::abs", [](double x) { return std::abs(x); }},
                                Function{"aten::exp", [](double x) { return std::exp(x / 100); }},
                                Function{"aten::erfc", [](double x) { return std::erfc(x / 100); }},
                                Function{"aten::clone", [](double x) { return x; }},
                                Function{"aten::zero_", [](double) { return 0.0; }}),
                         [](const auto& param) { return param.param.op.substr(6); });

}  // namespace
}  // namespace funcol::test::pointwise_test
