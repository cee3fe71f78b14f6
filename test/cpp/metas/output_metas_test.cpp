#include "metas/output_metas.h"

#include <gtest/gtest.h>

#include <string>

namespace funcol::output_metas_test {
namespace {

using List = Argument::List;

TensorMeta dense(std::vector<int64_t> shape, Dtype dtype = Dtype::kFloat32) {
  auto stride = contiguous_strides(shape);
  return {std::move(shape), std::move(stride), dtype};
}

Argument tensor(size_t number) { return {TensorNumber{number}}; }
Argument none() { return {}; }
Argument integers(std::initializer_list<int64_t> values) {
  List list;
  for (const auto value : values) {
    list.emplace_back().value = value;
  }
  return {std::move(list)};
}

TEST(OutputMetas, OfASumOverADim) {
  const OpCall call{"aten::sum.dim_IntList",
                    {{"self", tensor(0)}, {"dim", integers({0})}, {"keepdim", {true}}, {"dtype", none()}},
                    {dense({8, 4})},
                    {}};
  EXPECT_EQ(output_metas(call), (std::vector<std::optional<TensorMeta>>{dense({1, 4})}));
}

TEST(OutputMetas, KeepTheStridesOfInputs) {
  const OpCall call{"aten::neg", {{"self", tensor(0)}}, {{{4, 8}, {1, 4}, Dtype::kFloat64}}, {}};
  EXPECT_EQ(output_metas(call).at(0), (TensorMeta{{4, 8}, {1, 4}, Dtype::kFloat64}));
}

TEST(OutputMetas, OfAListAreEachElements) {
  const OpCall call{"aten::split.Tensor",
                    {{"self", tensor(0)}, {"split_size", {int64_t{3}}}, {"dim", {int64_t{0}}}},
                    {dense({7, 2})},
                    {}};
  const auto metas = output_metas(call);
  ASSERT_EQ(metas.size(), 3);
  EXPECT_EQ(metas[2]->shape, (std::vector<int64_t>{1, 2}));
}

TEST(OutputMetas, OfAnOperatorThatTakesLists) {
  const OpCall call{"aten::cat",
                    {{"tensors", {List{tensor(0), tensor(1)}}}, {"dim", {int64_t{-1}}}},
                    {dense({2, 3}), dense({2, 5})},
                    {}};
  EXPECT_EQ(output_metas(call).at(0), dense({2, 8}));
}

TEST(OutputMetas, OfOneElementOfAForeach) {
  const OpCall call{"aten::_foreach_mul.Scalar",
                    {{"self", tensor(0)}, {"scalar", {2.0}}},
                    {dense({2, 3}, Dtype::kBFloat16)},
                    {}};
  EXPECT_EQ(output_metas(call).at(0), dense({2, 3}, Dtype::kBFloat16));
}

TEST(OutputMetas, ADtypeArgumentIsTheResults) {
  const OpCall call{"aten::sum", {{"self", tensor(0)}, {"dtype", {Dtype::kFloat64}}}, {dense({8, 4})}, {}};
  EXPECT_EQ(output_metas(call).at(0)->dtype, Dtype::kFloat64);
}

TEST(OutputMetas, ANumberInATensorsPlaceDoesNotWidenTheDtype) {
  const OpCall call{
      "aten::div.Tensor", {{"self", tensor(0)}, {"other", {11.3}}}, {dense({2, 3}, Dtype::kBFloat16)}, {}};
  EXPECT_EQ(output_metas(call).at(0)->dtype, Dtype::kBFloat16);
}

TEST(OutputMetas, WhatTheOperatorRefusesItRefuses) {
  const OpCall call{
      "aten::mm", {{"self", tensor(0)}, {"mat2", tensor(1)}}, {dense({2, 3}), dense({2, 3})}, {}};
  EXPECT_THROW(output_metas(call), c10::Error);
}

TEST(OutputMetas, AnOperatorThatIsNoneIsNamed) {
  const OpCall call{"aten::no_such_operator", {}, {}, {}};
  try {
    output_metas(call);
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("aten::no_such_operator"), std::string::npos);
  }
}

}  // namespace
}  // namespace funcol::output_metas_test
