#include "propagation/rule.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace funcol::rule_test {
namespace {

using ::testing::Values;

class SameRule : public ::testing::TestWithParam<std::pair<std::string, std::string>> {};

TEST_P(SameRule, IsFoundForFormsOfAnOperator) {
  ASSERT_NE(find_rule(GetParam().first), nullptr);
  EXPECT_EQ(find_rule(GetParam().first), find_rule(GetParam().second));
}

INSTANTIATE_TEST_SUITE_P(Forms, SameRule,
                         Values(std::pair("aten::add.Tensor", "aten::add_.Tensor"),
                                std::pair("aten::add.Tensor", "aten::add.out"),
                                std::pair("aten::add.Tensor", "aten::_foreach_add_.List"),
                                std::pair("aten::__xor__.Tensor", "aten::__xor__.Scalar"),
                                std::pair("aten::tanh_backward", "aten::tanh_backward.grad_input"),
                                std::pair("aten::mm", "aten::mm.out")));

class NoRule : public ::testing::TestWithParam<std::string> {};

TEST_P(NoRule, IsFound) { EXPECT_EQ(find_rule(GetParam()), nullptr); }

// An unknown operator, parts of names, and an operator of which one overload has a rule.
INSTANTIATE_TEST_SUITE_P(Unknown, NoRule,
                         Values("aten::no_such_operator", "aten::ad", "add", "", "aten::", "aten::_foreach_",
                                "aten::where", "my::add.Tensor"));

TEST(Rules, AreListedInOrder) {
  const auto names = ops_with_rules();
  EXPECT_TRUE(std::ranges::is_sorted(names));
  EXPECT_NE(std::ranges::find(names, "aten::add"), names.end());
}

class PerElement : public ::testing::TestWithParam<std::pair<std::string, bool>> {};

TEST_P(PerElement, IsToldByTheName) { EXPECT_EQ(is_per_element(GetParam().first), GetParam().second); }

INSTANTIATE_TEST_SUITE_P(Operators, PerElement,
                         Values(std::pair("aten::_foreach_add.List", true),
                                std::pair("aten::_fused_adamw_.tensor_lr", true),
                                std::pair("aten::_amp_foreach_non_finite_check_and_unscale_", true),
                                std::pair("aten::_fused_rms_norm", false),
                                std::pair("aten::add.Tensor", false)));

class LocalSizes : public ::testing::TestWithParam<std::pair<std::string, LocalSizeArgs>> {};

TEST_P(LocalSizes, NameTheArgumentsThatTellThem) {
  EXPECT_EQ(local_size_args(GetParam().first), GetParam().second);
}

INSTANTIATE_TEST_SUITE_P(
    Operators, LocalSizes,
    Values(std::pair("aten::view", LocalSizeArgs{.shape = "size", .stride = {}}),
           std::pair("aten::reshape", LocalSizeArgs{.shape = "shape", .stride = {}}),
           std::pair("aten::new_empty_strided", LocalSizeArgs{.shape = "size", .stride = "stride"}),
           std::pair("aten::slice_backward.out", LocalSizeArgs{.shape = "input_sizes", .stride = {}}),
           std::pair("aten::squeeze_.dim", LocalSizeArgs{.shape = {}, .stride = {}, .squeezed_dims = true})));

TEST(LocalSizes, AreNotToldByOperatorsWithoutShapes) {
  EXPECT_EQ(local_size_args("aten::view.dtype"), std::nullopt);
  EXPECT_EQ(local_size_args("aten::add.Tensor"), std::nullopt);
}

}  // namespace
}  // namespace funcol::rule_test
