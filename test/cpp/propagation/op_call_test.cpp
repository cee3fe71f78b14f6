#include "propagation/op_call.h"

#include <gtest/gtest.h>

#include "support/refuses.h"

namespace funcol::op_call_test {
namespace {

using test::refuses;

OpCall sum_of_rows() {
  return {
      .op = "aten::sum.dim_IntList",
      .args = {{"self", {TensorNumber{0}}}, {"dim", {Argument::List{{int64_t{-1}}}}}, {"keepdim", {true}}},
      .tensors = {{{8, 4}, {4, 1}, Dtype::kFloat32}},
      .outputs = {TensorMeta{{8, 1}, {1, 1}, Dtype::kFloat32}}};
}

TEST(OpCall, FindsArgumentsByName) {
  EXPECT_EQ(sum_of_rows().arg("dim").integers(), std::vector<int64_t>{-1});
  EXPECT_TRUE(sum_of_rows().arg("keepdim").boolean());
  EXPECT_EQ(sum_of_rows().tensor("self").shape, (std::vector<int64_t>{8, 4}));
}

TEST(OpCall, NamesTheOperatorThatLacksAnArgument) {
  EXPECT_TRUE(refuses([] { sum_of_rows().arg("dims"); }, {"aten::sum.dim_IntList", "'dims'"}));
}

TEST(OpCall, CountsDimsFrom0) {
  EXPECT_EQ(counted_from_0(sum_of_rows(), -1, 2), 1);
  EXPECT_EQ(counted_from_0(sum_of_rows(), 1, 2), 1);
  EXPECT_EQ(counted_from_0(sum_of_rows(), -1, 0), 0);
}

TEST(OpCall, RefusesADimThatTheTensorLacks) {
  EXPECT_TRUE(refuses<std::out_of_range>([] { counted_from_0(sum_of_rows(), 2, 2); },
                                         {"aten::sum.dim_IntList", "dim 2", "2 dims"}));
}

TEST(Argument, GivesAnIntWhereANumberOrAListIsAskedFor) {
  const Argument argument{int64_t{3}};
  EXPECT_EQ(argument.number(), 3.0);
  EXPECT_EQ(argument.integers(), std::vector<int64_t>{3});
}

TEST(Argument, IsNothingElse) {
  EXPECT_TRUE(refuses([] { Argument{true}.integer(); }, {"an int"}));
  EXPECT_TRUE(refuses([] { Argument{2.5}.integers(); }, {"a list"}));
  EXPECT_TRUE(refuses([] { Argument{}.tensor(); }, {"a tensor"}));
}

TEST(TensorMeta, IsPrintedAsPyTorchDoes) {
  EXPECT_EQ(to_string(TensorMeta{{8, 4}, {4, 1}, Dtype::kBFloat16}), "bf16[8, 4]");
  EXPECT_EQ(to_string(TensorMeta{{}, {}, Dtype::kFloat8E4M3}), "f8e4m3fn[]");
}

TEST(Dtype, KnowsItsKind) {
  EXPECT_TRUE(is_floating_point(Dtype::kBFloat16));
  EXPECT_FALSE(is_floating_point(Dtype::kComplex64));
  EXPECT_TRUE(is_complex(Dtype::kComplex64));
  EXPECT_EQ(itemsize(Dtype::kComplex128), 16);
}

}  // namespace
}  // namespace funcol::op_call_test
