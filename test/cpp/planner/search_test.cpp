#include "planner/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <regex>
#include <string>
#include <vector>

#include "planner/legal.h"
#include "planner/shortest_paths.h"
#include "planner/tasks.h"
#include "support/refuses.h"

namespace funcol::search_test {
namespace {

using test::RandomTask;
using test::task_of;
using ::testing::Range;
using ::testing::Values;

// The number that the refusal of `max_bytes` names; -1 if it is not refused.
int64_t least_bytes_named(const Redistribution& task, const CostModel& model, int64_t max_bytes) {
  try {
    plan_redistribution(task, model, max_bytes);
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    std::smatch found;
    EXPECT_TRUE(std::regex_search(message, found, std::regex("max_bytes=([0-9]+)\\.$"))) << message;
    EXPECT_NE(message.find("at most " + std::to_string(max_bytes) + " bytes"), std::string::npos) << message;
    return std::stoll(found[1]);
  }
  return -1;
}

class RandomPair : public ::testing::TestWithParam<int> {
 protected:
  RandomPair() {
    RandomTask random(static_cast<uint32_t>(GetParam()), {});
    task_ = random.make();
    model_ = random.model(task_.mesh);
  }

  Redistribution task_;
  CostModel model_;
};

TEST_P(RandomPair, IsPlannedAsALegalChain) {
  const Plan plan = plan_redistribution(task_, model_);
  EXPECT_EQ(test::objection_to(plan), "") << test::described(task_) << ": " << to_string(plan);
}

TEST_P(RandomPair, IsPlannedAlikeTwice) {
  EXPECT_EQ(plan_redistribution(task_, model_), plan_redistribution(task_, model_));
}

TEST_P(RandomPair, IsPlannedForWhatWasAsked) {
  const Plan plan = plan_redistribution(task_, model_);
  EXPECT_EQ(std::tie(plan.mesh, plan.shape, plan.itemsize, plan.src, plan.dst),
            std::tie(task_.mesh, task_.shape, task_.itemsize, task_.src, task_.dst));
}

// Costs are sums of up to ten numbers.
constexpr double kRounding = 1e-9;

TEST_P(RandomPair, CostsTheSumOfItsSteps) {
  const Plan plan = plan_redistribution(task_, model_);
  const double sum = std::accumulate(plan.steps.begin(), plan.steps.end(), 0.0,
                                     [](double cost, const Step& step) { return cost + step.cost; });
  EXPECT_NEAR(plan.cost, sum, kRounding * sum);
}

TEST_P(RandomPair, HoldsAtMostTheMostOfItsSteps) {
  const Plan plan = plan_redistribution(task_, model_);
  int64_t most = task_.itemsize;
  for (const int64_t size :
       local_shape(task_.src, task_.mesh, task_.shape, Coordinate(task_.mesh.sizes.size(), 0))) {
    most *= size;
  }
  for (const auto& step : plan.steps) {
    most = std::max(most, step.peak_bytes);
  }
  EXPECT_EQ(plan.peak_bytes, most);
}

TEST_P(RandomPair, CostsNoMoreWithMergedAxes) {
  Redistribution apart = task_;
  apart.mesh.merged.clear();
  const double cost = plan_redistribution(apart, model_).cost;
  EXPECT_LE(plan_redistribution(task_, model_).cost, cost + kRounding * cost) << test::described(task_);
}

TEST_P(RandomPair, CostsNoLessWithinABound) {
  const Plan free = plan_redistribution(task_, model_);
  const Plan bound = plan_redistribution(task_, model_, free.peak_bytes);
  EXPECT_NEAR(bound.cost, free.cost, kRounding * free.cost);
}

TEST_P(RandomPair, WithinTheLeastBoundStaysWithinItAtEveryStep) {
  const int64_t least = least_bytes_named(task_, model_, -1);
  const Plan plan = plan_redistribution(task_, model_, least);
  for (const auto& step : plan.steps) {
    EXPECT_LE(step.peak_bytes, least) << to_string(step, plan.mesh) << ", " << test::described(task_);
  }
  EXPECT_EQ(test::objection_to(plan), "") << test::described(task_) << ": " << to_string(plan);
}

TEST_P(RandomPair, WithinAByteLessThanTheLeastBoundIsRefusedWithIt) {
  const int64_t least = least_bytes_named(task_, model_, -1);
  EXPECT_EQ(least_bytes_named(task_, model_, least - 1), least) << test::described(task_);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPair, Range(0, 300));

// Of one reduction: the reference makes the partials of the target while others that do not commute are
// pending.
class RandomPairOfDefaultOrders : public ::testing::TestWithParam<int> {
 protected:
  RandomPairOfDefaultOrders() {
    RandomTask random(static_cast<uint32_t>(GetParam()),
                      {.default_orders = true, .strided = GetParam() % 3 == 0, .one_op = true});
    task_ = random.make();
    model_ = random.model(task_.mesh);
  }

  Redistribution task_;
  CostModel model_;
};

TEST_P(RandomPairOfDefaultOrders, NeverCostsMoreThanTheGreedyPlan) {
  const Plan greedy = greedy_redistribution(task_, model_);
  EXPECT_LE(plan_redistribution(task_, model_).cost, greedy.cost * (1 + kRounding))
      << test::described(task_) << ", greedily " << to_string(greedy);
}

TEST_P(RandomPairOfDefaultOrders, IsALegalChainGreedily) {
  const Plan greedy = greedy_redistribution(task_, model_);
  EXPECT_EQ(test::objection_to(greedy), "") << test::described(task_) << ": " << to_string(greedy);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPairOfDefaultOrders, Range(1000, 1600));

class RandomPairOnSixAxes : public ::testing::TestWithParam<int> {};

TEST_P(RandomPairOnSixAxes, IsPlannedByCountingSteps) {
  RandomTask random(
      static_cast<uint32_t>(GetParam()),
      {.min_axes = 6, .max_axes = 6, .min_dims = 8, .max_dims = 8, .axis_sizes = {2}, .strided = false});
  Redistribution task = random.make();
  task.shape = {64, 8, 8, 8, 8, 8, 8, 8};
  task.mesh.merged.clear();
  const Plan plan = plan_redistribution(task, StepCounts{});
  ASSERT_FALSE(plan.steps.empty());
  EXPECT_EQ(plan.steps.back().after, task.dst) << test::described(task);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPairOnSixAxes, Range(5000, 5008));

struct OneRank {
  std::string src;
  std::string dst;
  ShardOrder src_order = {};
};

void PrintTo(const OneRank& pair, std::ostream* out) { *out << pair.src << " -> " << pair.dst; }

class AxesOfOneRank : public ::testing::TestWithParam<OneRank> {
 protected:
  static Plan planned(const Mesh& mesh, const CostModel& model) {
    return plan_redistribution(
        task_of(mesh, {4, 4}, {GetParam().src, GetParam().src_order}, {GetParam().dst}), model);
  }
};

TEST_P(AxesOfOneRank, NeedNoSteps) {
  const Mesh mesh{{1, 1}, {}, {0b11}};
  EXPECT_TRUE(planned(mesh, default_alpha_beta(mesh)).steps.empty());
}

TEST_P(AxesOfOneRank, CostNothing) {
  const Mesh mesh{{1, 1}, {}, {0b11}};
  EXPECT_EQ(planned(mesh, StepCounts{}).cost, 0);
}

INSTANTIATE_TEST_SUITE_P(Pairs, AxesOfOneRank,
                         Values(OneRank{"R,R", "R,R"}, OneRank{"S0,R", "R,S1"}, OneRank{"P,P", "R,S0"},
                                OneRank{"R,S0", "P,P(max)"}, OneRank{"S0,S0", "S0,S0", {{1, 0}}},
                                OneRank{"_S(0,2),S0", "S1,R"}));

TEST(Plan, OfAnAxisBesideOneOfOneRankLeavesThatAsTheTargetHasIt) {
  const Plan plan = plan_redistribution(task_of({{2, 1}, {}, {}}, {4, 4}, {"S0,S1"}, {"R,R"}), StepCounts{});
  ASSERT_EQ(plan.steps.size(), 1U);
  EXPECT_EQ(plan.steps.front().after, plan.dst);
}

// Plans that a reader can check. A mesh of {dp: 2, tp: 2}.
struct Worked {
  std::string name;
  test::Sides src;
  test::Sides dst;
  std::vector<AxisSet> merged;
  std::string plan;
};

void PrintTo(const Worked& worked, std::ostream* out) { *out << worked.name; }

class WorkedPlan : public ::testing::TestWithParam<Worked> {};

TEST_P(WorkedPlan, IsFoundByCountingSteps) {
  const auto& [name, src, dst, merged, text] = GetParam();
  const Plan plan =
      plan_redistribution(task_of({{2, 2}, {"dp", "tp"}, merged}, {8, 8}, src, dst), StepCounts{});
  std::string steps;
  for (const auto& step : plan.steps) {
    steps += (steps.empty() ? "" : "; ") + to_string(step, plan.mesh);
  }
  EXPECT_EQ(steps, text);
}

INSTANTIATE_TEST_SUITE_P(
    Plans, WorkedPlan,
    Values(Worked{"Nothing", {"S0,S1"}, {"S0,S1"}, {}, ""},
           Worked{"Gather", {"S0,S1"}, {"R,S1"}, {}, "all_gather(dim 0, dp)"},
           Worked{"GatherLastCutOfItsOrder", {"S0,S0", {{1, 0}}}, {"R,S0"}, {}, "all_gather(dim 0, dp)"},
           Worked{"ReduceMerged", {"P,P"}, {"R,R"}, {0b11}, "all_reduce(sum, dp+tp)"},
           Worked{"ScatterMerged", {"P,P"}, {"S0,S0"}, {0b11}, "reduce_scatter(sum, dim 0, dp+tp)"},
           Worked{"GatherMerged", {"S1,S1"}, {"R,R"}, {0b11}, "all_gather(dim 1, dp+tp)"},
           Worked{"SwapDims", {"S0,S1"}, {"S1,S0"}, {0b11}, "permute(dim 0, 1 -> 1, 0, dp+tp)"},
           Worked{"SwapOrder", {"S0,S0"}, {"S0,S0", {{1, 0}}}, {0b11}, "permute(dim 0 -> 0, dp+tp)"},
           Worked{"OtherDim", {"S0,R"}, {"S1,R"}, {}, "all_to_all(dim 0 -> 1, dp)"},
           Worked{"Embed", {"R,S0"}, {"R,P"}, {}, "embed(dim 0 -> sum, tp)"},
           Worked{"ToPartial", {"S0,R"}, {"S0,P(max)"}, {}, "to_partial(max, tp)"},
           Worked{"Split", {"R,R"}, {"R,S1"}, {}, "split(dim 1, tp)"}),
    [](const auto& param) { return param.param.name; });

Redistribution masked(const Mesh& mesh, std::vector<Placement> src, std::vector<Placement> dst) {
  return {mesh,
          {8, 4},
          1,
          make_layout("test", std::move(src), {}, mesh, 2),
          make_layout("test", std::move(dst), {}, mesh, 2)};
}

const Placement kMasked = Placement::partial(PartialOp::kSum, 1);
const Placement kOtherMask = Placement::partial(PartialOp::kSum, 2);
const Placement kR = Placement::replicate();

struct MaskedCase {
  std::vector<Placement> src;
  std::vector<Placement> dst;
  std::string plan;
};

void PrintTo(const MaskedCase& one, std::ostream* out) { *out << one.plan; }

class MaskedPartials : public ::testing::TestWithParam<MaskedCase> {
 protected:
  const Mesh mesh_{{2, 2}, {"dp", "tp"}, {}};
  const Redistribution task_ = masked(mesh_, GetParam().src, GetParam().dst);
};

TEST_P(MaskedPartials, AreUnmaskedFirstAndMaskedLast) {
  EXPECT_EQ(to_string(plan_redistribution(task_, StepCounts{})), GetParam().plan);
}

TEST_P(MaskedPartials, ArePlannedAsALegalChain) {
  EXPECT_EQ(test::objection_to(plan_redistribution(task_, StepCounts{})), "");
}

TEST_P(MaskedPartials, ArePlannedAlikeGreedily) {
  EXPECT_EQ(to_string(greedy_redistribution(task_, StepCounts{})), GetParam().plan);
}

TEST_P(MaskedPartials, WithinTheLeastBoundStayWithinItAtEveryStep) {
  const int64_t least = least_bytes_named(task_, StepCounts{}, -1);
  EXPECT_LE(plan_redistribution(task_, StepCounts{}, least).peak_bytes, least);
}

TEST_P(MaskedPartials, WithinAByteLessThanTheLeastBoundAreRefusedWithIt) {
  const int64_t least = least_bytes_named(task_, StepCounts{}, -1);
  EXPECT_EQ(least_bytes_named(task_, StepCounts{}, least - 1), least);
}

INSTANTIATE_TEST_SUITE_P(
    Pairs, MaskedPartials,
    Values(MaskedCase{{kR, kMasked}, {kR, kR}, "RMaskP(sum)->RP(sum)->RR"},
           MaskedCase{{kR, kMasked}, {kR, Placement::partial()}, "RMaskP(sum)->RP(sum)"},
           MaskedCase{{kR, kMasked}, {kR, Placement::shard(0)}, "RMaskP(sum)->RP(sum)->RS(0)"},
           MaskedCase{{Placement::shard(0), kMasked}, {kR, kR}, "S(0)MaskP(sum)->S(0)P(sum)->S(0)R->RR"},
           MaskedCase{{kR, kR}, {kR, kMasked}, "RR->RMaskP(sum)"},
           MaskedCase{{kR, Placement::shard(1)}, {kR, kMasked}, "RS(1)->RR->RMaskP(sum)"},
           MaskedCase{{kR, kMasked}, {kR, kOtherMask}, "RMaskP(sum)->RP(sum)->RR->RMaskP(sum)"}));

struct MaskBesideOneRank {
  std::vector<Placement> src;
  std::vector<Placement> dst;
};

class MaskedPartialBesideAnAxisOfOneRank : public ::testing::TestWithParam<MaskBesideOneRank> {};

TEST_P(MaskedPartialBesideAnAxisOfOneRank, EndsAtTheTarget) {
  const Plan plan =
      plan_redistribution(masked({{2, 1}, {}, {}}, GetParam().src, GetParam().dst), StepCounts{});
  ASSERT_EQ(plan.steps.size(), 1U);
  EXPECT_EQ(plan.steps.back().after, plan.dst);
}

INSTANTIATE_TEST_SUITE_P(Ends, MaskedPartialBesideAnAxisOfOneRank,
                         Values(MaskBesideOneRank{{kR, Placement::shard(1)}, {kMasked, Placement::partial()}},
                                MaskBesideOneRank{{kMasked, Placement::shard(1)},
                                                  {Placement::partial(), kR}}));

// A permutation of the dims that all axes cut, on a mesh without merged groups, and its least cost.
struct Permuted {
  std::vector<int64_t> axes;
  int64_t size = 0;  // of each dim
  std::vector<int> dims;
  double least_us = 0;  // found by the search without a limit

  Redistribution task() const {
    std::vector<Placement> src;
    std::vector<Placement> dst;
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      src.push_back(Placement::shard(static_cast<int64_t>(axis)));
      dst.push_back(Placement::shard(dims[axis]));
    }
    return {{axes, {}, {}},
            std::vector<int64_t>(axes.size(), size),
            4,
            {src, default_shard_order(src)},
            {dst, default_shard_order(dst)}};
  }
};

class PermutedDims : public ::testing::TestWithParam<Permuted> {};

// The first case ends before the limit, the others do not.
TEST_P(PermutedDims, CostAtMostTheSlackMoreThanTheLeast) {
  const Redistribution task = GetParam().task();
  const Plan plan = plan_redistribution(task, default_alpha_beta(task.mesh));
  EXPECT_GE(plan.cost, GetParam().least_us - 1e-3) << to_string(plan);
  EXPECT_LE(plan.cost, GetParam().least_us * kSlack) << to_string(plan);
}

INSTANTIATE_TEST_SUITE_P(OnFiveAxes, PermutedDims,
                         Values(Permuted{{2, 2, 2, 2, 2}, 48, {1, 2, 3, 0, 4}, 1463.547},
                                Permuted{{2, 2, 2, 2, 2}, 48, {1, 2, 3, 4, 0}, 1972.524},
                                Permuted{{2, 2, 2, 2, 2}, 24, {4, 0, 1, 2, 3}, 120.504},
                                Permuted{{2, 2, 2, 2, 2}, 24, {1, 2, 0, 4, 3}, 124.029},
                                Permuted{{2, 2, 2, 2, 2}, 7, {1, 0, 3, 4, 2}, 50.347},
                                Permuted{{2, 3, 2, 4, 2}, 24, {1, 2, 3, 4, 0}, 79.821}));

class FourPermutedDims : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(FourPermutedDims, CostWhatASearchWithoutAnEstimateFinds) {
  const Redistribution task = Permuted{{2, 3, 2, 4}, 7, GetParam()}.task();
  const AlphaBeta model = default_alpha_beta(task.mesh);
  const Costs costs(model, task.mesh);
  const double least =
      ShortestPaths(task.mesh, costs, task.shape, 4, task.src, task.src.placements).cost_to(task.dst);
  EXPECT_NEAR(plan_redistribution(task, model).cost, least, kRounding * least);
}

INSTANTIATE_TEST_SUITE_P(OfCycles, FourPermutedDims,
                         Values(std::vector{1, 2, 3, 0}, std::vector{1, 0, 3, 2}, std::vector{1, 2, 0, 3}));

TEST(NormPartial, IsNotPlannedAsASum) {
  const Mesh mesh{{2, 2}, {"dp", "tp"}, {}};
  EXPECT_TRUE(test::refuses(
      [&] {
        plan_redistribution(masked(mesh, {kR, Placement::norm_partial({2, true})}, {kR, kR}), StepCounts{});
      },
      {"plan_redistribution: _NormP(2) of mesh axis tp", "Reduce it before by its own rule"}));
}

TEST(MaskedPartial, ThatStaysOnATensorThatStaysNeedsNoSteps) {
  const Mesh mesh{{2, 2}, {}, {}};
  EXPECT_TRUE(plan_redistribution(masked(mesh, {kR, kMasked}, {kR, kMasked}), StepCounts{}).steps.empty());
}

TEST(MaskedPartial, ThatStaysOnATensorThatChangesIsRefused) {
  const Mesh mesh{{2, 2}, {"dp", "tp"}, {}};
  EXPECT_TRUE(test::refuses(
      [&] {
        plan_redistribution(masked(mesh, {Placement::shard(0), kMasked}, {kR, kMasked}), StepCounts{});
      },
      {"plan_redistribution: ", "MaskP(sum) of mesh axis tp stays", "S(0)MaskP(sum) -> RMaskP(sum)",
       "Reduce it"}));
}

TEST(Plan, OfNineAxesOfSeveralRanksIsRefused) {
  const Mesh mesh{std::vector<int64_t>(9, 2), {}, {}};
  const Layout layout{std::vector<Placement>(9), {}};
  EXPECT_TRUE(test::refuses(
      [&] {
        plan_redistribution({mesh, {4}, 4, layout, layout}, StepCounts{});
      },
      {"plan_redistribution: 9 mesh axes", "at most 8"}));
}

TEST(Plan, OfNineAxesOfWhichOneHasOneRankIsMade) {
  Mesh mesh{std::vector<int64_t>(9, 2), {}, {}};
  mesh.sizes[4] = 1;
  Layout src{std::vector<Placement>(9), {{8}}};
  src.placements[8] = Placement::shard(0);
  const Layout dst{std::vector<Placement>(9), {}};
  EXPECT_EQ(plan_redistribution({mesh, {4}, 4, src, dst}, StepCounts{}).steps.size(), 1U);
}

TEST(Plan, OfSeventeenDimsIsRefused) {
  const Mesh mesh{{2}, {}, {}};
  const Layout layout{{kR}, {}};
  EXPECT_TRUE(test::refuses(
      [&] {
        plan_redistribution({mesh, std::vector<int64_t>(17, 1), 4, layout, layout}, StepCounts{});
      },
      {"plan_redistribution: 17 dims", "at most 16"}));
}

TEST(Plan, OfAScalarReducesIt) {
  const Plan plan = plan_redistribution(task_of({{2}, {}, {}}, {}, {"P"}, {"R"}), StepCounts{});
  EXPECT_EQ(to_string(plan), "P(sum)->R");
}

}  // namespace
}  // namespace funcol::search_test
