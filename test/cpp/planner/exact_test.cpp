#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/exhaustive.h"
#include "planner/search.h"
#include "planner/tasks.h"

namespace funcol::exact_test {
namespace {

enum class Model { kStepCounts, kAlphaBeta, kSlowFirstAxis };

CostModel model_of(Model model, const Mesh& mesh) {
  if (model == Model::kStepCounts) {
    return StepCounts{};
  }
  return model == Model::kAlphaBeta ? default_alpha_beta(mesh) : test::slow_first_axis(mesh);
}

// Layouts of all combinations of these placements in all orders; every `stride`-th is a target, all are
// sources.
struct Scenario {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  std::string choices;
  int64_t itemsize;
  size_t stride = 1;
};

struct Target {
  Scenario scenario;
  bool merged;
  Model model;
  Layout dst;
};

void PrintTo(const Target& target, std::ostream* out) {
  *out << "mesh " << test::joined(target.scenario.mesh) << ", shape " << test::joined(target.scenario.shape)
       << ", itemsize " << target.scenario.itemsize << (target.merged ? ", merged" : "") << ", model "
       << static_cast<int>(target.model) << ", to " << to_string(target.dst);
}

Mesh mesh_of(const Scenario& scenario, bool merged) {
  return {scenario.mesh, {}, merged ? test::all_merged(scenario.mesh.size()) : std::vector<AxisSet>{}};
}

std::vector<Target> targets_of(const std::vector<Scenario>& scenarios) {
  std::vector<Target> targets;
  for (const auto& scenario : scenarios) {
    const auto layouts = test::all_layouts(mesh_of(scenario, false), parse_placements(scenario.choices));
    for (const bool merged : {false, true}) {
      for (const Model model : {Model::kStepCounts, Model::kAlphaBeta, Model::kSlowFirstAxis}) {
        for (size_t i = 0; i < layouts.size() && (!merged || scenario.mesh.size() > 1);
             i += scenario.stride) {
          targets.push_back({scenario, merged, model, layouts[i]});
        }
      }
    }
  }
  return targets;
}

class ToEachLayout : public ::testing::TestWithParam<Target> {};

// Costs are sums of up to ten numbers. The two sides add them in different orders.
constexpr double kRounding = 1e-9;

TEST_P(ToEachLayout, PlansFromAllLayoutsCostWhatAnExhaustiveSearchFinds) {
  const auto& [scenario, merged, model_name, dst] = GetParam();
  const Mesh mesh = mesh_of(scenario, merged);
  const CostModel model = model_of(model_name, mesh);
  const auto sources = test::all_layouts(mesh, parse_placements(scenario.choices));
  test::Exhaustive exhaustive({mesh, scenario.shape, scenario.itemsize, {}, dst}, model, sources);
  for (const auto& src : sources) {
    const Plan plan = plan_redistribution({mesh, scenario.shape, scenario.itemsize, src, dst}, model);
    const double least = exhaustive.cost_from(src);
    ASSERT_LT(least, 1e9) << "no way from " << to_string(src);
    EXPECT_NEAR(plan.cost, least, kRounding * least) << "from " << to_string(src) << ": " << to_string(plan);
  }
}

const std::vector<Scenario> kScenarios = {
    {{2}, {8}, "R,S0,P", 4},
    {{2}, {0, 4}, "R,S0,S1,P", 4},
    {{2}, {8, 5}, "R,S0,S1,_S(0,2),P,P(avg)", 1 << 16},
    {{4}, {8, 8}, "R,S0,S1,P", 4},
    {{4}, {5, 1, 8}, "R,S0,S1,S2,_S(2,2),P(max)", 1 << 16},
    {{2, 2}, {8, 8}, "R,S0,S1,P", 4},
    {{2, 2}, {8, 8}, "R,S0,S1,P,P(avg)", 1 << 16},
    {{2, 2}, {1, 3}, "R,S0,S1,P", 4},
    {{2, 2}, {8, 5}, "R,S0,S1,_S(0,2),P", 1 << 16},
    {{2, 2}, {1, 8, 4}, "R,S0,S1,S2,P(max)", 1 << 14},
    {{2, 2}, {8, 4, 8, 4}, "R,S1,S2,P", 1 << 14},
    {{3, 2}, {12, 12}, "R,S0,S1,P", 4},
    {{3, 2}, {12, 6}, "R,S0,S1,P", 1 << 18},
    {{3, 2}, {7, 5}, "R,S0,S1,P", 1 << 14},
    {{3, 2}, {7, 12}, "R,S0,_S(1,2),_S(1,3),P", 1 << 14},
    {{2, 3}, {6, 6, 6}, "R,S1,S2,P", 1 << 14},
    {{2, 2, 2}, {8, 8}, "R,S0,S1,P", 4, 3},
    {{2, 2, 2}, {8, 16}, "R,S0,S1,P", 1 << 17, 3},
    {{2, 2, 2}, {5, 9}, "R,S0,S1,P", 1 << 17, 3},
    {{2, 2, 2}, {8, 8, 8}, "R,S1,S2", 1 << 14, 3},
    {{2, 3, 2}, {12, 7}, "R,S0,_S(0,2),P", 1 << 14, 3},
};

INSTANTIATE_TEST_SUITE_P(AllPairs, ToEachLayout, ::testing::ValuesIn(targets_of(kScenarios)));

class RandomPairOfSeveralRanks : public ::testing::TestWithParam<int> {};

TEST_P(RandomPairOfSeveralRanks, CostsWhatAnExhaustiveSearchFinds) {
  test::RandomTask random(static_cast<uint32_t>(GetParam()),
                          {.max_axes = 3, .max_dims = 3, .axis_sizes = {2, 3, 4}});
  const Redistribution task = random.make();
  const CostModel model = random.model(task.mesh);
  const Plan plan = plan_redistribution(task, model);
  const double least = test::Exhaustive(task, model, {task.src}).cost_from(task.src);
  ASSERT_LT(least, 1e9) << "no way in " << test::described(task);
  EXPECT_NEAR(plan.cost, least, kRounding * least) << test::described(task) << ": " << to_string(plan);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPairOfSeveralRanks, ::testing::Range(0, 200));

// On uneven dims the cheapest plan scatters a partial that both ends have, and embeds it again.
TEST(PartialThatStays, IsScatteredWhileAnotherAxisMovesIfThatIsCheapest) {
  const Mesh mesh{{3, 5}, {}, {}};
  const auto task = test::task_of(mesh, {3, 12, 2}, {"P(bor),_S(2,3)"}, {"_S(2,4),P(bor)"}, 1 << 16);
  constexpr LinkCost kLink{3, 0.0003};
  const AlphaBeta model{
      {{{19, 0.0003}, kLink, kLink, kLink, kLink}, {kLink, kLink, kLink, {0, 0.0019}, {12, 0.0014}}}, {}};
  const double least = test::Exhaustive(task, model, {task.src}).cost_from(task.src);
  const Plan plan = plan_redistribution(task, model);
  EXPECT_NEAR(plan.cost, least, kRounding * least) << to_string(plan);
}

}  // namespace
}  // namespace funcol::exact_test
