#include "planner/reach.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/search.h"
#include "planner/tasks.h"

namespace funcol {
namespace {

using ::testing::Range;
using ::testing::Values;
using ::testing::ValuesIn;

// Sums of up to ten numbers, added in another order.
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
  Reach reach_{mesh_,
               costs_,
               GetParam().scenario.shape,
               GetParam().scenario.itemsize,
               GetParam().layout,
               parse_placements(GetParam().scenario.choices)};
};

TEST_P(FromEachLayout, AllLayoutsCostWhatTheirPlansCost) {
  for (const auto& target : layouts_of(GetParam().scenario)) {
    const double cost = planned(target);
    EXPECT_NEAR(reach_.to(target), cost, kRounding * cost) << "to " << to_string(target);
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

}  // namespace
}  // namespace funcol
