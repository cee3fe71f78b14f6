#include "planner/shortest_paths.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/search.h"
#include "planner/tasks.h"

namespace funcol::shortest_paths_test {
namespace {

using ::testing::Range;
using ::testing::Values;
using ::testing::ValuesIn;

constexpr double kNever = std::numeric_limits<double>::infinity();

// Costs are sums of up to ten numbers. The two sides add them in different orders.
constexpr double kRounding = 1e-9;

struct Scenario {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  std::string choices;
  int64_t itemsize;
  size_t stride = 1;  // every so many layouts are sources, all are targets
};

struct Source {
  Scenario scenario;
  bool counts;  // steps, not microseconds
  Layout layout;
};

void PrintTo(const Source& source, std::ostream* out) {
  *out << "mesh " << test::joined(source.scenario.mesh) << ", shape " << test::joined(source.scenario.shape)
       << ", itemsize " << source.scenario.itemsize << (source.counts ? ", step counts" : "") << ", from "
       << to_string(source.layout);
}

bool may_mix(const Layout& layout) {
  for (const auto& a : layout.placements) {
    for (const auto& b : layout.placements) {
      if (a.is_partial() && b.is_partial() && !commute(a.op, b.op)) {
        return false;
      }
    }
  }
  return true;
}

std::vector<Layout> layouts_of(const Scenario& scenario) {
  auto layouts = test::all_layouts({scenario.mesh, {}, {}}, parse_placements(scenario.choices));
  std::erase_if(layouts, [](const Layout& layout) { return !may_mix(layout); });
  return layouts;
}

std::vector<Source> sources_of(const std::vector<Scenario>& scenarios) {
  std::vector<Source> sources;
  for (const auto& scenario : scenarios) {
    const auto layouts = layouts_of(scenario);
    for (size_t i = 0; i < layouts.size(); i += scenario.stride) {
      sources.push_back({scenario, false, layouts[i]});
      sources.push_back({scenario, true, layouts[i]});
    }
  }
  return sources;
}

CostModel model_of(const Source& source, const Mesh& mesh) {
  return source.counts ? CostModel(StepCounts{}) : CostModel(default_alpha_beta(mesh));
}

class FromEachLayout : public ::testing::TestWithParam<Source> {
 protected:
  double planned(const Layout& target) const {
    const auto& scenario = GetParam().scenario;
    return plan_redistribution({mesh_, scenario.shape, scenario.itemsize, GetParam().layout, target}, model_)
        .cost;
  }

  const Mesh mesh_{GetParam().scenario.mesh, {}, {}};
  const CostModel model_ = model_of(GetParam(), mesh_);
  const Costs costs_{model_, mesh_};
  ShortestPaths paths_{mesh_,
                       costs_,
                       GetParam().scenario.shape,
                       GetParam().scenario.itemsize,
                       GetParam().layout,
                       parse_placements(GetParam().scenario.choices)};
};

TEST_P(FromEachLayout, AllLayoutsCostWhatTheirPlansCost) {
  for (const auto& target : layouts_of(GetParam().scenario)) {
    const double cost = planned(target);
    EXPECT_NEAR(paths_.cost_to(target), cost, kRounding * cost) << "to " << to_string(target);
  }
}

const std::vector<Scenario> kScenarios = {
    {{2}, {8}, "R,S0,P", 4},
    {{4}, {0, 4}, "R,S0,S1,P", 4},
    {{2}, {8, 5}, "R,S0,S1,_S(0,2),P,P(avg)", 1 << 16},
    {{1}, {8}, "R,S0,P", 4},
    {{3}, {5, 1, 8}, "R,S0,S1,S2,_S(2,2),P(max)", 1 << 16},
    {{2, 2}, {8, 8}, "R,S0,S1,P,P(avg)", 4},
    {{2, 2}, {8, 8}, "R,S0,S1,P", 1 << 18},
    {{2, 1}, {8, 8}, "R,S0,S1,P", 4},
    {{2, 4}, {5, 3}, "R,S0,S1,_S(0,2),P", 1 << 14},
    {{3, 2}, {12, 12}, "R,_S(0,2),_S(0,3),S0,S1", 4},
    {{2, 2}, {1, 8, 4}, "R,S0,S1,S2,P(max)", 1 << 14},
    {{2, 2, 2}, {8, 8}, "R,S0,S1,P", 4, 3},
    {{2, 2, 2}, {8, 16}, "R,S0,S1,P", 1 << 16, 7},
    {{2, 3, 2}, {5, 9}, "R,S0,S1,P", 1 << 10, 7},
    {{2, 1, 2}, {4, 4, 4}, "R,S0,S2", 1 << 10, 5},
    {{2, 3, 2}, {12, 7}, "R,S0,_S(0,2),P", 1 << 14, 7},
};

INSTANTIATE_TEST_SUITE_P(Scenarios, FromEachLayout, ValuesIn(sources_of(kScenarios)));

// One redistribution at random.
class RandomTarget : public ::testing::TestWithParam<int> {
 protected:
  RandomTarget() : random_(static_cast<uint32_t>(GetParam()), {.max_axes = 3}), task_(random_.make()) {}

  double reached(const Mesh& mesh, const CostModel& model) const {
    const Costs costs(model, mesh);
    ShortestPaths paths(mesh, costs, task_.shape, task_.itemsize, task_.src, task_.dst.placements);
    return paths.cost_to(task_.dst);
  }

  test::RandomTask random_;
  Redistribution task_;
};

TEST_P(RandomTarget, CostsWhatItsPlanCostsOnAMeshWithoutMergedAxes) {
  task_.mesh.merged.clear();
  const CostModel model = random_.model(task_.mesh);
  const double cost = plan_redistribution(task_, model).cost;
  EXPECT_NEAR(reached(task_.mesh, model), cost, kRounding * cost) << test::described(task_);
}

TEST_P(RandomTarget, NeverCostsLessThanItsPlan) {
  const CostModel model = random_.model(task_.mesh);
  EXPECT_GE(reached(task_.mesh, model), plan_redistribution(task_, model).cost * (1 - kRounding))
      << test::described(task_);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTarget, Range(0, 300));

struct Exchange {
  std::string name;
  test::Sides src;
  test::Sides dst;
  std::vector<int64_t> shape = {8, 8};
};

void PrintTo(const Exchange& exchange, std::ostream* out) { *out << exchange.name; }

class DirectExchange : public ::testing::TestWithParam<Exchange> {};

TEST_P(DirectExchange, OverMergedAxesIsTaken) {
  const auto& [name, src, dst, shape] = GetParam();
  const Mesh mesh{{2, 2, 2}, {}, test::all_merged(3)};
  const auto task = test::task_of(mesh, shape, src, dst);
  const Costs costs(StepCounts{}, mesh);
  ShortestPaths paths(mesh, costs, shape, 4, task.src, task.dst.placements);
  ASSERT_EQ(plan_redistribution(task, StepCounts{}).cost, 1);
  EXPECT_EQ(paths.cost_to(task.dst), 1);
}

INSTANTIATE_TEST_SUITE_P(Kinds, DirectExchange,
                         Values(Exchange{"SwapDims", {"S0,S1,R"}, {"S1,S0,R"}},
                                Exchange{"SwapDimsBehindAnother", {"S0,S0,S1"}, {"S0,S1,S0"}},
                                Exchange{"SwapOrder", {"S0,S0,R"}, {"S0,S0,R", {{1, 0}}}},
                                Exchange{"OtherAxis", {"S0,R,P"}, {"R,S0,P"}},
                                Exchange{"Rotate", {"S0,S0,S1"}, {"S0,S1,S0", {{2, 0}, {1}}}},
                                Exchange{"Reverse", {"S0,S0,S0"}, {"S0,S0,S0", {{2, 1, 0}}}},
                                Exchange{"Uneven", {"S0,S1,R"}, {"S1,S0,R"}, {5, 3}},
                                Exchange{"ToStrided", {"S1,S0,R"}, {"_S(0,2),S1,R"}}),
                         [](const auto& param) { return param.param.name; });

// Of f32[8, 8] on two axes, "S0,R" before.
class Reached : public ::testing::Test {
 protected:
  Layout layout(const std::string& placements) const { return test::layout_of({placements}, mesh_, 2); }

  const Mesh mesh_{{2, 4}, {}, {}};
  const Costs costs_{StepCounts{}, mesh_};
  ShortestPaths paths_{mesh_, costs_, {8, 8}, 4, layout("S0,R"), parse_placements("S0,S1,P")};
};

TEST_F(Reached, SourceCostsNothing) { EXPECT_EQ(paths_.cost_to(layout("S0,R")), 0); }

TEST_F(Reached, LayoutCostsTheSameWhateverWasAskedForBefore) {
  const double first = paths_.cost_to(layout("S1,S1"));
  paths_.cost_to(layout("R,R"));
  ShortestPaths other(mesh_, costs_, {8, 8}, 4, layout("S0,R"), parse_placements("S0,S1,P"));
  other.cost_to(layout("R,R"));
  EXPECT_EQ(other.cost_to(layout("S1,S1")), first);
}

TEST_F(Reached, LayoutsComeFromTheNearestToTheFarthest) {
  std::vector<double> costs;
  for (size_t n = 0; paths_.nearest(n) != nullptr; ++n) {
    costs.push_back(paths_.nearest(n)->cost);
  }
  EXPECT_TRUE(std::ranges::is_sorted(costs));
}

TEST_F(Reached, LayoutsComeOnceEach) {
  std::vector<State> states;
  for (size_t n = 0; paths_.nearest(n) != nullptr; ++n) {
    EXPECT_EQ(std::ranges::count(states, paths_.nearest(n)->state), 0);
    states.push_back(paths_.nearest(n)->state);
  }
  // Two axes of R, S0, S1 and P each, and both orders of the cuts of one dim.
  EXPECT_EQ(states.size(), 4 * 4 + 2);
}

TEST_F(Reached, NothingCostsMoreThanTheFarthest) {
  size_t num = 0;
  while (paths_.nearest(num) != nullptr) {
    ++num;
  }
  EXPECT_EQ(paths_.at_least(num), kNever);
}

class OutsideOfTheVocabulary : public Reached, public ::testing::WithParamInterface<std::string> {};

TEST_P(OutsideOfTheVocabulary, NothingIsReached) { EXPECT_EQ(paths_.cost_to(layout(GetParam())), kNever); }

INSTANTIATE_TEST_SUITE_P(Placements, OutsideOfTheVocabulary, Values("S0,P(max)", "S0,_S(1,2)", "P(avg),R"));

const Placement kR = Placement::replicate();
const Placement kMasked = Placement::partial(PartialOp::kSum, 1);

struct MaskedCase {
  std::vector<Placement> src;
  std::vector<Placement> dst;
};

Layout masked(const std::vector<Placement>& placements, const Mesh& mesh) {
  return make_layout("test", placements, {}, mesh, 2);
}

class MaskOnTheWay : public ::testing::TestWithParam<MaskedCase> {};

TEST_P(MaskOnTheWay, CostsWhatItsPlanCosts) {
  const Mesh mesh{{2, 2}, {}, {}};
  const AlphaBeta model = default_alpha_beta(mesh);
  const Costs costs(model, mesh);
  const Layout src = masked(GetParam().src, mesh);
  const Layout dst = masked(GetParam().dst, mesh);
  ShortestPaths paths(mesh, costs, {8, 4}, 4, src, GetParam().dst);
  const double cost = plan_redistribution({mesh, {8, 4}, 4, src, dst}, model).cost;
  EXPECT_NEAR(paths.cost_to(dst), cost, kRounding * cost);
}

INSTANTIATE_TEST_SUITE_P(Applied, MaskOnTheWay,
                         Values(MaskedCase{{kR, kMasked}, {kR, kMasked}}, MaskedCase{{kR, kMasked}, {kR, kR}},
                                MaskedCase{{kR, kMasked}, {kR, Placement::partial()}},
                                MaskedCase{{kMasked, kMasked}, {kR, Placement::shard(1)}},
                                MaskedCase{{Placement::shard(0), kMasked}, {kR, kR}}));

INSTANTIATE_TEST_SUITE_P(Made, MaskOnTheWay,
                         Values(MaskedCase{{kR, kR}, {kR, kMasked}}, MaskedCase{{kR, kR}, {kMasked, kR}},
                                MaskedCase{{Placement::shard(1), kR}, {Placement::shard(1), kMasked}},
                                MaskedCase{{Placement::shard(0), kMasked}, {kMasked, kR}},
                                MaskedCase{{kR, Placement::partial(PartialOp::kSum, 2)}, {kR, kMasked}}));

TEST(AMaskOfTheSource, StaysNowhereElse) {
  const Mesh mesh{{2, 2}, {}, {}};
  const Costs costs(StepCounts{}, mesh);
  ShortestPaths paths(mesh, costs, {8, 4}, 4, masked({Placement::shard(0), kMasked}, mesh), {});
  EXPECT_EQ(paths.cost_to(masked({kR, kMasked}, mesh)), kNever);
}

TEST(RedistributionCosts, AreThoseOfEachSourceToEachTarget) {
  const Mesh mesh{{2, 2}, {}, {}};
  const auto layouts = test::all_layouts(mesh, parse_placements("R,S0,S1,P"));
  const TensorMeta meta{{8, 4}, {4, 1}, Dtype::kFloat32};
  std::vector<double> planned;
  for (const auto& src : layouts) {
    for (const auto& dst : layouts) {
      planned.push_back(plan_redistribution({mesh, meta.shape, 4, src, dst}, StepCounts{}).cost);
    }
  }
  EXPECT_EQ(redistribution_costs(layouts, layouts, meta, mesh, StepCounts{}), planned);
}

}  // namespace
}  // namespace funcol::shortest_paths_test
