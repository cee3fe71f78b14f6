#include "planner/dtensor_costs.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "planner/shortest_paths.h"

namespace funcol::dtensor_costs_test {
namespace {

using ::testing::Combine;
using ::testing::TestWithParam;
using ::testing::ValuesIn;

constexpr double kNever = std::numeric_limits<double>::infinity();

Layout layout(const std::string& text) {
  auto placements = parse_placements(text);
  auto order = default_shard_order(placements);
  return {std::move(placements), std::move(order)};
}

double cost(const std::string& source, const std::string& target, const Mesh& mesh, double bytes) {
  return dtensor_cost(layout(source), layout(target), bytes, ring_axes(mesh));
}

TEST(DTensorCosts, ChargeAGatherForItsHopsAndTheBytesOfTheWhole) {
  const double gb = 64.0 / (1 << 30);
  EXPECT_DOUBLE_EQ(cost("S0", "R", Mesh{{2}, {}, {}}, 64), 6.6 + 2.7 + gb / 2 / (87.7 * 0.22) * 1e6);
}

TEST(DTensorCosts, ChargeLessWithinAHost) {
  Mesh mesh{{2, 4}, {}, {}};
  mesh.ranks_per_host = 4;
  EXPECT_LT(cost("R,S0", "R,R", mesh, 64), cost("S0,R", "R,R", mesh, 64));
}

TEST(DTensorCosts, PreferAGatherToAnExchange) {
  EXPECT_GT(cost("S0", "S1", Mesh{{2}, {}, {}}, 64), 1.0 + cost("S0", "R", Mesh{{2}, {}, {}}, 32) - 1e-9);
}

TEST(DTensorCosts, GatherWhatIsCutOtherwiseFurtherOut) {
  EXPECT_GT(cost("S0,S0", "R,S0", Mesh{{2, 2}, {}, {}}, 64), cost("S0,R", "R,R", {{2, 2}, {}, {}}, 64));
}

TEST(DTensorCosts, ForbidShardsToBecomePartials) {
  EXPECT_EQ(cost("S0", "P", Mesh{{2}, {}, {}}, 64), kNever);
}

TEST(DTensorCosts, ChangeNothingForATensorThatAllHold) {
  EXPECT_EQ(cost("R,R", "S0,P", Mesh{{2, 2}, {}, {}}, 64), 0);
}

const std::vector<std::string> kLayouts{"R,R", "R,S0", "S0,R", "S0,S0", "S1,S0", "P,R", "P,S1", "P,P"};

class EveryTarget : public TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(EveryTarget, OfAReachHasTheCostOfTheWholeRedistribution) {
  const auto& [source, target] = GetParam();
  const Mesh mesh{{2, 3}, {}, {}};
  const Costs costs(DTensorCosts{}, mesh);
  ShortestPaths paths(mesh, costs, {8, 6}, 4, layout(source), parse_placements("S0,S1,P"));
  EXPECT_EQ(paths.cost_to(layout(target)), cost(source, target, mesh, 8 * 6 * 4));
}

INSTANTIATE_TEST_SUITE_P(DTensorCosts, EveryTarget, Combine(ValuesIn(kLayouts), ValuesIn(kLayouts)));

}  // namespace
}  // namespace funcol::dtensor_costs_test
