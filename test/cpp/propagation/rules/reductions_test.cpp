#include <gtest/gtest.h>

#include "propagation/rules/cut_and_run.h"

namespace funcol::test::reductions_test {
namespace {

OpCall reduction(const std::string& op, const Shape& shape, const Shape& dims, bool keepdim,
                 Dtype dtype = Dtype::kFloat32) {
  Shape result;
  for (int64_t dim = 0; dim < static_cast<int64_t>(shape.size()); ++dim) {
    const bool is_reduced = std::ranges::find(dims, dim) != dims.end() || dims.empty();
    if (!is_reduced || keepdim) {
      result.push_back(is_reduced ? 1 : shape[dim]);
    }
  }
  return CallOf(op)
      .with("self", tensor(shape, dtype))
      .with("dim", integers(dims))
      .with("keepdim", keepdim)
      .gives({tensor(result, dtype)});
}

TEST(ReductionRules, ASumOverACutDimIsPending) {
  EXPECT_EQ(texts_of(reduction("aten::sum.dim_IntList", {4, 3}, {0}, false)),
            (Texts{"S0 <- S1", "P(sum) <- S0", "P(sum) <- P(sum)", "P(avg) <- P(avg)"}));
}

TEST(ReductionRules, KeptDimsStayWhereTheyAre) {
  EXPECT_TRUE(has_row(reduction("aten::sum.dim_IntList", {4, 3}, {0}, true), "S1 <- S1"));
}

TEST(ReductionRules, NoDimsAreAll) {
  EXPECT_TRUE(shard_rows_of(reduction("aten::sum.dim_IntList", {4, 3}, {}, false)).empty());
}

TEST(ReductionRules, NoneAreNoneWhereTheShapeStays) {
  const auto call = CallOf("aten::any.dims")
                        .with("self", tensor({4, 3}))
                        .with("dim", integers({}))
                        .with("keepdim", false)
                        .gives({tensor({4, 3}, Dtype::kBool)});
  EXPECT_EQ(shard_rows_of(call), (Texts{"S0 <- S0", "S1 <- S1"}));
}

TEST(ReductionRules, OfOneElementAndNoDimsNeedItOnEveryRank) {
  EXPECT_TRUE(shard_rows_of(reduction("aten::sum.dim_IntList", {1, 1}, {}, true)).empty());
}

TEST(ReductionRules, BoolsAreCountedButNotPending) {
  const auto call =
      CallOf("aten::sum").with("self", tensor({4}, Dtype::kBool)).gives({tensor({}, Dtype::kInt64)});
  EXPECT_TRUE(has_row(call, "P(sum) <- S0"));
  EXPECT_FALSE(has_row(call, "P(sum) <- P(sum)"));
}

TEST(ReductionRules, MeansAreTakenOfEvenPartsAlone) {
  const auto call = reduction("aten::mean.dim", {6, 5}, {0}, false);
  EXPECT_TRUE(is_legal(call, {"P(avg)"}, {"S0"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"P(avg)"}, {"S0"}, {{4}, {}, {}}));
  EXPECT_TRUE(is_legal(call, {"S0"}, {"S1"}, {{4}, {}, {}}));
}

TEST(ReductionRules, ThereIsNoExtremeOfNothing) {
  const auto call = reduction("aten::amax", {5, 4}, {0}, false);
  EXPECT_TRUE(is_legal(call, {"P(max)"}, {"S0"}, {{3}, {}, {}}));
  EXPECT_FALSE(is_legal(call, {"P(max)"}, {"S0"}, {{4}, {}, {}}));
  EXPECT_TRUE(is_legal(call, {"S0"}, {"S1"}, {{8}, {}, {}}));
}

TEST(ReductionRules, PlacesOfExtremesNeedTheWholeDim) {
  const auto call = CallOf("aten::max.dim")
                        .with("self", tensor({4, 3}))
                        .with("dim", int64_t{-1})
                        .with("keepdim", false)
                        .gives({tensor({4}), tensor({4}, Dtype::kInt64)});
  EXPECT_EQ(texts_of(call), Texts{"S0 S0 <- S0"});
}

TEST(ReductionRules, TheGreatestOfAllIsPending) {
  const auto call = CallOf("aten::max").with("self", tensor({4, 3})).gives(Shape{});
  EXPECT_EQ(texts_of(call), (Texts{"P(max) <- S0", "P(max) <- S1", "P(max) <- P(max)"}));
}

TEST(ReductionRules, PowersDoNotGoOnPending) {
  EXPECT_FALSE(has_row(reduction("aten::linalg__powsum", {4}, {0}, false), "P(sum) <- P(sum)"));
}

OpCall vector_norm(double order, const Shape& shape = {4, 3}, int64_t dim = 0) {
  Shape result = shape;
  result.erase(result.begin() + dim);
  return CallOf("aten::linalg_vector_norm")
      .with("self", tensor(shape))
      .with("ord", Argument{order})
      .with("dim", integers({dim}))
      .with("keepdim", false)
      .gives(result);
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class PendingNorm : public ::testing::TestWithParam<std::pair<double, std::string>> {};

TEST_P(PendingNorm, IsOfItsOrder) {
  EXPECT_EQ(texts_of(vector_norm(GetParam().first)), (Texts{"S0 <- S1", GetParam().second + " <- S0"}));
}

INSTANTIATE_TEST_SUITE_P(Orders, PendingNorm,
                         ::testing::Values(std::pair(2.0, "_NormP(2.0)"), std::pair(-1.5, "_NormP(-1.5)"),
                                           std::pair(0.0, "P(sum)"), std::pair(kInfinity, "P(max)"),
                                           std::pair(-kInfinity, "P(min)")));

TEST(NormRules, OfNoNumberIsOfAll) {
  EXPECT_EQ(texts_of(vector_norm(std::numeric_limits<double>::quiet_NaN())), Texts{"S0 <- S1"});
}

TEST(NormRules, AnOrderIsWrittenAsItWasGiven) {
  const auto call =
      CallOf("aten::norm.Scalar").with("self", tensor({4})).with("p", int64_t{3}).gives(Shape{});
  EXPECT_EQ(texts_of(call), Texts{"_NormP(3) <- S0"});
}

TEST(NormRules, NoOrderIsTheSecond) {
  const auto call =
      CallOf("aten::norm.ScalarOpt_dim").with("self", tensor({4})).with_none("p").with("dim", integers({0}));
  EXPECT_EQ(texts_of(CallOf(call).gives(Shape{})), Texts{"_NormP(2) <- S0"});
}

class NormOfNothing : public ::testing::TestWithParam<std::pair<double, bool>> {};

TEST_P(NormOfNothing, IsThereForPositiveOrders) {
  EXPECT_EQ(is_legal(vector_norm(GetParam().first, {5, 4}), {"P"}, {"S0"}, {{4}, {}, {}}), GetParam().second);
}

INSTANTIATE_TEST_SUITE_P(Orders, NormOfNothing,
                         ::testing::Values(std::pair(2.0, true), std::pair(0.0, true), std::pair(-1.0, false),
                                           std::pair(kInfinity, false), std::pair(-kInfinity, false)));

// The reductions without rounding.
class NormOfParts : public ::testing::TestWithParam<double> {};

TEST_P(NormOfParts, IsThePartOfTheWhole) {
  const double order = GetParam();
  const auto op = [order](const std::vector<Numbers>& inputs, const Shape& shape) {
    const auto& input = inputs.at(0);
    const double start = order < 0 ? kInfinity : 0;
    Numbers output{shape, std::vector<double>(num_elements(shape), start)};
    for (size_t i = 0; i < input.values.size(); ++i) {
      auto& value = output.values.at(i % output.values.size());
      const double size = std::abs(input.values[i]);
      value = order == 1   ? value + size
              : order == 0 ? value + (size == 0 ? 0 : 1)
              : order > 0  ? std::max(value, size)
                           : std::min(value, size);
    }
    return output;
  };
  EXPECT_TRUE(all_rows_are_right(vector_norm(order, {5, 3}), op));
}

INSTANTIATE_TEST_SUITE_P(Orders, NormOfParts, ::testing::Values(0.0, 1.0, kInfinity, -kInfinity));

TEST(ReductionRules, BinsOfTheDataAreKnownToNoPart) {
  const auto histogram = [](int64_t min, int64_t max) {
    return CallOf("aten::histc")
        .with("self", tensor({8}))
        .with("bins", int64_t{4})
        .with("min", min)
        .with("max", max)
        .gives(Shape{4});
  };
  EXPECT_EQ(texts_of(histogram(0, 1)), Texts{"P(sum) <- S0"});
  EXPECT_TRUE(texts_of(histogram(0, 0)).empty());
}

TEST(ScanRules, ADimIsGoneThroughWhole) {
  const auto call = CallOf("aten::sort")
                        .with("self", tensor({4, 3}))
                        .with("dim", int64_t{-1})
                        .gives({tensor({4, 3}), tensor({4, 3}, Dtype::kInt64)});
  EXPECT_EQ(texts_of(call), Texts{"S0 S0 <- S0"});
}

TEST(ScanRules, CumulativeSumsArePendingAsTheirInput) {
  const auto call =
      CallOf("aten::cumsum_").with("self", tensor({4, 3})).with("dim", int64_t{0}).gives({4, 3});
  EXPECT_EQ(texts_of(call), (Texts{"S1 <- S1", "P(sum) <- P(sum)", "P(avg) <- P(avg)"}));
}

TEST(ScanRules, GradientsOfSoftmaxAreLinear) {
  const auto call = CallOf("aten::_log_softmax_backward_data")
                        .with("grad_output", tensor({4, 3}))
                        .with("output", tensor({4, 3}))
                        .with("dim", int64_t{1})
                        .gives({4, 3});
  EXPECT_EQ(texts_of(call), (Texts{"S0 <- S0 S0", "P(sum) <- P(sum) R", "P(avg) <- P(avg) R"}));
}

TEST(ScanRules, ABroadcastDimIsNotCut) {
  const auto call = CallOf("aten::linalg_cross")
                        .with("self", tensor({4, 3}))
                        .with("other", tensor({1, 3}))
                        .with("dim", int64_t{-1})
                        .gives({4, 3});
  EXPECT_TRUE(texts_of(call).empty());
}

TEST(ScanRules, OfAScalarAreNone) {
  const auto call = CallOf("aten::cumprod").with("self", tensor({})).with("dim", int64_t{0}).gives(Shape{});
  EXPECT_TRUE(texts_of(call).empty());
}

struct Reduction {
  std::string op;
  double start;
  double (*of)(double, double);
};

class ReductionOfParts : public ::testing::TestWithParam<std::tuple<Reduction, Shape, Shape, bool>> {};

TEST_P(ReductionOfParts, IsThePartOfTheWhole) {
  const auto& [reduction_of, shape, dims, keepdim] = GetParam();
  const auto op = [&, &reduction_of = reduction_of, &dims = dims](const std::vector<Numbers>& inputs,
                                                                  const Shape& output_shape) {
    const auto& input = inputs.at(0);
    Numbers output{output_shape, std::vector<double>(num_elements(output_shape), reduction_of.start)};
    for (int64_t element = 0; element < static_cast<int64_t>(input.values.size()); ++element) {
      const auto index = index_of(element, input.shape);
      Shape kept;
      for (size_t dim = 0; dim < index.size(); ++dim) {
        if (std::ranges::find(dims, static_cast<int64_t>(dim)) == dims.end()) {
          kept.push_back(index[dim]);
        } else if (output_shape.size() == index.size()) {
          kept.push_back(0);
        }
      }
      auto& value = output.values.at(element_at(kept, output_shape));
      value = reduction_of.of(value, input.values[element]);
    }
    if (reduction_of.op == "aten::mean.dim") {
      double count = 1;
      for (const int64_t dim : dims) {
        count *= static_cast<double>(input.shape[dim]);
      }
      for (auto& value : output.values) {
        value /= count;
      }
    }
    return output;
  };
  EXPECT_TRUE(all_rows_are_right(reduction(reduction_of.op, shape, dims, keepdim), op));
}

double added(double a, double b) { return a + b; }
double multiplied(double a, double b) { return a * b; }
double greater(double a, double b) { return std::max(a, b); }
double smaller(double a, double b) { return std::min(a, b); }

INSTANTIATE_TEST_SUITE_P(All, ReductionOfParts,
                         ::testing::Combine(::testing::Values(Reduction{"aten::sum.dim_IntList", 0, added},
                                                              Reduction{"aten::mean.dim", 0, added},
                                                              Reduction{"aten::prod.dim_int", 1, multiplied},
                                                              Reduction{"aten::amax", -1e9, greater},
                                                              Reduction{"aten::amin", 1e9, smaller}),
                                            ::testing::Values(Shape{4, 3, 2}, Shape{5, 1, 3}),
                                            ::testing::Values(Shape{0}, Shape{0, 2}), ::testing::Bool()));

}  // namespace
}  // namespace funcol::test::reductions_test
