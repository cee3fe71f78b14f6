#include "planner/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "support/refuses.h"

namespace funcol::cost_model_test {
namespace {

using ::testing::Combine;
using ::testing::Range;
using ::testing::Values;

const Mesh kMesh{{2, 4, 3}, {}, {}};
constexpr int64_t kBytes = 24 << 10;

// Costs are sums of a few numbers. The two sides add them in different orders.
constexpr double kRounding = 1e-9;

StepSize step(StepKind kind, AxisSet axes, int64_t bytes_full, int64_t bytes_copied = 0) {
  return {kind, axes, kBytes, kBytes, bytes_full, bytes_copied};
}

struct Counted {
  StepKind kind;
  double steps;
  std::string name;
};

class KindOfStep : public ::testing::TestWithParam<std::tuple<Counted, AxisSet>> {
 protected:
  const Counted counted_ = std::get<0>(GetParam());
  const AxisSet axes_ = std::get<1>(GetParam());
};

TEST_P(KindOfStep, CountsAsTheReferenceCountsIt) {
  EXPECT_EQ(Costs(StepCounts{}, kMesh).of(step(counted_.kind, axes_, kBytes, kBytes)), counted_.steps);
}

TEST_P(KindOfStep, IsPrintedByItsName) { EXPECT_EQ(to_string(counted_.kind), counted_.name); }

TEST_P(KindOfStep, CommunicatesIfItCounts) { EXPECT_EQ(communicates(counted_.kind), counted_.steps > 0); }

TEST_P(KindOfStep, CostsItsCopyOnTop) {
  const Costs costs(default_alpha_beta(kMesh), kMesh);
  const double copy = 2.0 + kBytes * 1e6 / 500e9;
  const double apart = costs.of(step(counted_.kind, axes_, kBytes)) + copy;
  EXPECT_NEAR(costs.of(step(counted_.kind, axes_, kBytes, kBytes)), apart, kRounding * apart);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, KindOfStep,
    Combine(Values(Counted{StepKind::kAllGather, 2, "all_gather"},
                   Counted{StepKind::kReduceScatter, 2, "reduce_scatter"},
                   Counted{StepKind::kAllReduce, 4, "all_reduce"},
                   Counted{StepKind::kAllToAll, 1, "all_to_all"}, Counted{StepKind::kPermute, 1, "permute"},
                   Counted{StepKind::kSplit, 0, "split"}, Counted{StepKind::kToPartial, 0, "to_partial"},
                   Counted{StepKind::kEmbed, 0, "embed"}, Counted{StepKind::kApplyMask, 0, "apply_mask"},
                   Counted{StepKind::kMask, 0, "mask"}),
            Values(0b001, 0b010, 0b110, 0b111)),
    [](const auto& param) {
      return std::get<0>(param.param).name + "_over_" + std::to_string(std::get<1>(param.param));
    });

struct Priced {
  StepKind kind;
  AxisSet axes;
  double latency;
  double times_bytes;  // how often the bytes are sent
};

class DefaultModel : public ::testing::TestWithParam<Priced> {};

TEST_P(DefaultModel, PricesAStepByPyTorchsNumbers) {
  const auto& [kind, axes, latency, times_bytes] = GetParam();
  const double expected = latency + times_bytes * kBytes * 1e6 / 87.7e9;
  const Costs costs(default_alpha_beta(kMesh), kMesh);
  EXPECT_NEAR(costs.of(step(kind, axes, kBytes)), expected, kRounding * expected);
}

// Axes of 2, 4 and 3 ranks; merged ones have the latency of the slowest.
INSTANTIATE_TEST_SUITE_P(Steps, DefaultModel,
                         Values(Priced{StepKind::kAllGather, 0b001, 7.2, 1.0 / 2},
                                Priced{StepKind::kAllGather, 0b010, 8.4, 3.0 / 4},
                                Priced{StepKind::kReduceScatter, 0b100, 7.8, 2.0 / 3},
                                Priced{StepKind::kAllReduce, 0b010, 10.2, 2 * 3.0 / 4},
                                Priced{StepKind::kAllToAll, 0b010, 8.4, 3.0 / 4},
                                Priced{StepKind::kPermute, 0b001, 7.2, 1.0},
                                Priced{StepKind::kAllGather, 0b011, 8.4, 7.0 / 8},
                                Priced{StepKind::kReduceScatter, 0b111, 8.4, 23.0 / 24},
                                Priced{StepKind::kAllReduce, 0b101, 9.0, 2 * 5.0 / 6},
                                Priced{StepKind::kAllToAll, 0b110, 8.4, 11.0 / 12},
                                Priced{StepKind::kPermute, 0b111, 8.4, 1.0}));

TEST(DefaultModel, PricesACopyAfterItsLatency) {
  EXPECT_EQ(default_alpha_beta(kMesh).copy, (LinkCost{2.0, 1e6 / 500e9}));
}

class CollectiveOfOneRank : public ::testing::TestWithParam<StepKind> {};

TEST_P(CollectiveOfOneRank, CostsNothing) {
  const Mesh mesh{{1, 4, 1}, {}, {}};
  EXPECT_EQ(Costs(default_alpha_beta(mesh), mesh).of(step(GetParam(), 0b101, kBytes)), 0);
}

TEST_P(CollectiveOfOneRank, AddsNothingToAMergedSet) {
  const Mesh mesh{{1, 4, 1}, {}, {}};
  const Costs costs(default_alpha_beta(mesh), mesh);
  EXPECT_EQ(costs.of(step(GetParam(), 0b111, kBytes)), costs.of(step(GetParam(), 0b010, kBytes)));
}

TEST_P(CollectiveOfOneRank, CountsNoSteps) {
  const Mesh mesh{{1, 4, 1}, {}, {}};
  EXPECT_EQ(Costs(StepCounts{}, mesh).of(step(GetParam(), 0b101, kBytes)), 0);
}

INSTANTIATE_TEST_SUITE_P(Collectives, CollectiveOfOneRank,
                         Values(StepKind::kAllGather, StepKind::kReduceScatter, StepKind::kAllReduce,
                                StepKind::kAllToAll, StepKind::kPermute));

// Latencies and prices of one order of magnitude, the same for the same seed.
AlphaBeta random_model(uint32_t seed, const Mesh& mesh) {
  std::mt19937 random(seed);
  const auto up_to_100 = [&random] { return static_cast<double>(1 + random() % 100); };
  const auto link = [&up_to_100] {
    const double latency = up_to_100();
    return LinkCost{latency, up_to_100() * 1e-4};
  };
  AlphaBeta model;
  for (size_t axis = 0; axis < mesh.sizes.size(); ++axis) {
    model.axes.push_back({link(), link(), link(), link(), link()});
  }
  model.copy = link();
  return model;
}

// A random price of every collective, and axes of which one is slower than another for all of them.
AlphaBeta random_topology(uint32_t seed, const Mesh& mesh) {
  std::mt19937 random(seed);
  AlphaBeta model = random_model(seed, mesh);
  const AxisCost first = model.axes.front();
  for (auto& axis : model.axes) {
    const auto slower = static_cast<double>(1 + random() % 20);
    const auto scaled = [slower](const LinkCost& link) {
      return LinkCost{link.latency_us * slower, link.us_per_byte * slower};
    };
    axis = {scaled(first.all_gather), scaled(first.reduce_scatter), scaled(first.all_reduce),
            scaled(first.all_to_all), scaled(first.permute)};
  }
  return model;
}

using SeedAndAxes = std::tuple<int, AxisSet>;

class OverAnyAxes : public ::testing::TestWithParam<SeedAndAxes> {
 protected:
  const uint32_t seed_ = static_cast<uint32_t>(std::get<0>(GetParam()));
  const AxisSet axes_ = std::get<1>(GetParam());
  const int64_t num_ranks_ = kMesh.num_ranks(axes_);
  const Costs costs_{with_triangle_inequality(num_axes(axes_) == 1 ? random_model(seed_, kMesh)
                                                                   : random_topology(seed_, kMesh)),
                     kMesh};

  double of(StepKind kind, int64_t bytes_full) const { return costs_.of(step(kind, axes_, bytes_full)); }
};

TEST_P(OverAnyAxes, AnAllReduceCostsNoMoreThanAReduceScatterAndAnAllGather) {
  const double parts = of(StepKind::kReduceScatter, kBytes) + of(StepKind::kAllGather, kBytes);
  EXPECT_LE(of(StepKind::kAllReduce, kBytes), parts * (1 + kRounding));
}

TEST_P(OverAnyAxes, AnAllToAllCostsNoMoreThanAnAllGather) {
  EXPECT_LE(of(StepKind::kAllToAll, kBytes), of(StepKind::kAllGather, num_ranks_ * kBytes) * (1 + kRounding));
}

TEST_P(OverAnyAxes, APermuteCostsNoMoreThanAnAllGather) {
  EXPECT_LE(of(StepKind::kPermute, kBytes), of(StepKind::kAllGather, num_ranks_ * kBytes) * (1 + kRounding));
}

INSTANTIATE_TEST_SUITE_P(Models, OverAnyAxes, Combine(Range(0, 30), Range<AxisSet>(1, 8)));

using SeedKindAndAxes = std::tuple<int, StepKind, AxisSet>;

class OverMergedAxes : public ::testing::TestWithParam<SeedKindAndAxes> {
 protected:
  const StepKind kind_ = std::get<1>(GetParam());
  const AxisSet axes_ = std::get<2>(GetParam());

  // The same collective axis by axis, in this order: gathers grow on the way, scatters shrink.
  double axis_by_axis(const Costs& costs, const std::vector<int64_t>& order) const {
    int64_t bytes = kind_ == StepKind::kAllGather ? kBytes / kMesh.num_ranks(axes_) : kBytes;
    double cost = 0;
    for (const int64_t axis : order) {
      bytes *= kind_ == StepKind::kAllGather ? kMesh.sizes[axis] : 1;
      cost += costs.of(step(kind_, axis_set(axis), bytes));
      bytes /= kind_ == StepKind::kReduceScatter ? kMesh.sizes[axis] : 1;
    }
    return cost;
  }

  double cheapest_axis_by_axis(const Costs& costs) const {
    std::vector<int64_t> order;
    for (int64_t axis = 0; axis < kMesh.num_axes(); ++axis) {
      if (contains(axes_, axis)) {
        order.push_back(axis);
      }
    }
    double cheapest = axis_by_axis(costs, order);
    while (std::ranges::next_permutation(order).found) {
      cheapest = std::min(cheapest, axis_by_axis(costs, order));
    }
    return cheapest;
  }
};

TEST_P(OverMergedAxes, ACollectiveNeverCostsMoreThanAxisByAxis) {
  const Costs costs(random_model(static_cast<uint32_t>(std::get<0>(GetParam())), kMesh), kMesh);
  EXPECT_LE(costs.of(step(kind_, axes_, kBytes)), cheapest_axis_by_axis(costs) * (1 + kRounding));
}

TEST_P(OverMergedAxes, ACollectiveCostsAtLeastThatOverItsSlowestAxis) {
  const Costs costs(random_topology(static_cast<uint32_t>(std::get<0>(GetParam())), kMesh), kMesh);
  double slowest = 0;
  for (int64_t axis = 0; axis < kMesh.num_axes(); ++axis) {
    slowest = std::max(slowest, contains(axes_, axis) ? costs.of(step(kind_, axis_set(axis), 0)) : 0);
  }
  EXPECT_EQ(costs.of(step(kind_, axes_, 0)), slowest);
}

INSTANTIATE_TEST_SUITE_P(Models, OverMergedAxes,
                         Combine(Range(0, 10),
                                 Values(StepKind::kAllGather, StepKind::kReduceScatter, StepKind::kAllReduce,
                                        StepKind::kAllToAll, StepKind::kPermute),
                                 Values(0b011, 0b101, 0b110, 0b111)));

class AnyModel : public ::testing::TestWithParam<int> {
 protected:
  const AlphaBeta model_ = with_triangle_inequality(random_model(static_cast<uint32_t>(GetParam()), kMesh));
};

TEST_P(AnyModel, WithTheTriangleInequalityIsNotChangedByItAgain) {
  EXPECT_EQ(with_triangle_inequality(model_), model_);
}

TEST_P(AnyModel, HasALeastPriceThatNoCollectiveIsBelow) {
  const Costs costs(model_, kMesh);
  double least = INFINITY;
  for (const auto& axis : model_.axes) {
    for (const LinkCost& link :
         {axis.all_gather, axis.reduce_scatter, axis.all_reduce, axis.all_to_all, axis.permute}) {
      least = std::min(least, link.us_per_byte);
    }
  }
  EXPECT_LE(costs.least_us_per_byte(), least);
}

INSTANTIATE_TEST_SUITE_P(Seeds, AnyModel, Range(0, 10));

TEST(AlphaBeta, OfAnotherNumberOfAxesIsRefused) {
  const Mesh mesh{{2, 4}, {}, {}};
  EXPECT_TRUE(
      test::refuses([&] { Costs(default_alpha_beta(kMesh), mesh); },
                    {"AlphaBeta: ", "3 axes for a mesh of 2 axes", "Give one AxisCost for each axis"}));
}

TEST(AlphaBeta, SendsOverASlowAxisOnlyWhatHasToCrossIt) {
  AlphaBeta model;
  const LinkCost slow{0, 1};
  const LinkCost fast{0, 0.25};
  model.axes = {{slow, slow, slow, slow, slow}, {fast, fast, fast, fast, fast}};
  const Mesh mesh{{2, 4}, {}, {}};
  // Of 8 shards of 1 byte a rank sends its own over the slow axis, then 2 at a time to 3 others over the fast
  // one.
  EXPECT_EQ(Costs(model, mesh).of({StepKind::kAllGather, 0b11, 1, 8, 8, 0}), 1 * 1 + 6 * 0.25);
}

}  // namespace
}  // namespace funcol::cost_model_test
