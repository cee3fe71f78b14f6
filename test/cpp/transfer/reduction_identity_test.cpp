#include "transfer/reduction_identity.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <tuple>

namespace funcol::reduction_identity_test {
namespace {

at::Tensor reduced(PartialOp op, const at::Tensor& a, const at::Tensor& b) {
  const bool is_bool = a.scalar_type() == at::kBool;
  switch (op) {
    case PartialOp::kSum:
      return is_bool ? a.logical_or(b) : a + b;
    case PartialOp::kProduct:
      return a * b;
    case PartialOp::kMin:
      return at::minimum(a, b);
    case PartialOp::kMax:
      return at::maximum(a, b);
    case PartialOp::kBand:
      return a.bitwise_and(b);
    case PartialOp::kBor:
      return a.bitwise_or(b);
    case PartialOp::kBxor:
      return a.bitwise_xor(b);
    case PartialOp::kAvg:
      break;
  }
  return {};
}

class NeutralElements : public testing::TestWithParam<std::tuple<PartialOp, at::ScalarType>> {};

TEST_P(NeutralElements, LeaveEveryValueAsItIs) {
  const auto& [op, dtype] = GetParam();
  const auto values = at::tensor({0, 1, 2, 77, 127}).to(dtype);
  const auto neutral = at::full_like(values, neutral_element(op, dtype));
  EXPECT_TRUE(at::equal(reduced(op, neutral, values), values));
  EXPECT_TRUE(at::equal(reduced(op, values, neutral), values));
}

INSTANTIATE_TEST_SUITE_P(
    Arithmetic, NeutralElements,
    testing::Combine(testing::Values(PartialOp::kSum, PartialOp::kProduct, PartialOp::kMin, PartialOp::kMax),
                     testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong,
                                     at::kShort, at::kChar, at::kByte, at::kBool)));
INSTANTIATE_TEST_SUITE_P(
    Bitwise, NeutralElements,
    testing::Combine(testing::Values(PartialOp::kBand, PartialOp::kBor, PartialOp::kBxor),
                     testing::Values(at::kInt, at::kLong, at::kShort, at::kChar, at::kByte, at::kBool)));
INSTANTIATE_TEST_SUITE_P(Complex, NeutralElements,
                         testing::Combine(testing::Values(PartialOp::kSum, PartialOp::kProduct),
                                          testing::Values(at::kComplexFloat, at::kComplexDouble)));

TEST(NeutralElement, OfAMinimumIsTheLargestNumber) {
  EXPECT_EQ(neutral_element(PartialOp::kMin, at::kLong).toLong(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(neutral_element(PartialOp::kMax, at::kLong).toLong(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(neutral_element(PartialOp::kMin, at::kByte).toLong(), 255);
}

TEST(NeutralElement, OfAMinimumOfComplexNumbersIsATypeError) {
  EXPECT_THROW(neutral_element(PartialOp::kMin, at::kComplexFloat), c10::TypeError);
}

}  // namespace
}  // namespace funcol::reduction_identity_test
