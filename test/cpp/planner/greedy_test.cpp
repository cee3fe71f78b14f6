#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "planner/legal.h"
#include "planner/search.h"
#include "planner/tasks.h"
#include "support/refuses.h"

namespace funcol::greedy_test {
namespace {

using test::task_of;
using ::testing::Values;

std::string steps_of(const Plan& plan) {
  std::string text;
  for (const auto& step : plan.steps) {
    text += (text.empty() ? "" : "; ") + to_string(step, plan.mesh);
  }
  return text;
}

struct HandWorked {
  Mesh mesh;
  std::string src;
  std::string dst;
  std::string steps;
};

void PrintTo(const HandWorked& pair, std::ostream* out) { *out << pair.src << " -> " << pair.dst; }

class GreedyPlan : public ::testing::TestWithParam<HandWorked> {
 protected:
  static Redistribution task() {
    return task_of(GetParam().mesh, {24, 24}, {GetParam().src}, {GetParam().dst});
  }
};

TEST_P(GreedyPlan, IsTheOneWorkedByHand) {
  EXPECT_EQ(steps_of(greedy_redistribution(task(), StepCounts{})), GetParam().steps);
}

TEST_P(GreedyPlan, IsALegalChain) {
  EXPECT_EQ(test::objection_to(greedy_redistribution(task(), StepCounts{})), "");
}

const Mesh kLine{{4}, {"tp"}, {}};
const Mesh kPlane{{2, 4}, {"dp", "tp"}, {}};
const Mesh kMergedPlane{{2, 4}, {"dp", "tp"}, {0b11}};
const Mesh kCube{{2, 3, 2}, {"pp", "dp", "tp"}, {}};
const Mesh kThin{{1, 2, 4}, {"pp", "dp", "tp"}, {}};

INSTANTIATE_TEST_SUITE_P(
    OneAxis, GreedyPlan,
    Values(HandWorked{kLine, "S0", "S0", ""}, HandWorked{kLine, "S0", "R", "all_gather(dim 0, tp)"},
           HandWorked{kLine, "S0", "S1", "all_to_all(dim 0 -> 1, tp)"},
           HandWorked{kLine, "R", "S1", "split(dim 1, tp)"},
           HandWorked{kLine, "P", "R", "all_reduce(sum, tp)"},
           HandWorked{kLine, "P(max)", "S1", "reduce_scatter(max, dim 1, tp)"},
           HandWorked{kLine, "R", "P(avg)", "to_partial(avg, tp)"},
           HandWorked{kLine, "S0", "P", "embed(dim 0 -> sum, tp)"},
           HandWorked{kLine, "P", "P(max)", "all_reduce(sum, tp); to_partial(max, tp)"},
           HandWorked{kLine, "_S(0,2)", "S0", "all_gather(dim 0, tp); split(dim 0, tp)"}));

INSTANTIATE_TEST_SUITE_P(
    TwoAxes, GreedyPlan,
    Values(
        HandWorked{kPlane, "S0,S1", "R,S1", "all_gather(dim 0, dp)"},
        HandWorked{kPlane, "S0,S0", "R,R", "all_gather(dim 0, tp); all_gather(dim 0, dp)"},
        HandWorked{kPlane, "S0,S0", "R,S0", "all_gather(dim 0, tp); all_gather(dim 0, dp); split(dim 0, tp)"},
        HandWorked{kPlane, "S0,R", "R,S0", "all_gather(dim 0, dp); split(dim 0, tp)"},
        HandWorked{kPlane, "R,S0", "S0,R", "all_gather(dim 0, tp); split(dim 0, dp)"},
        HandWorked{kPlane, "S0,S1", "S1,S0",
                   "all_gather(dim 1, tp); all_to_all(dim 0 -> 1, dp); split(dim 0, tp)"},
        HandWorked{kPlane, "S0,S0", "S1,S1",
                   "all_gather(dim 0, tp); all_to_all(dim 0 -> 1, dp); split(dim 1, tp)"},
        HandWorked{kPlane, "S0,S0", "S0,S1", "all_to_all(dim 0 -> 1, tp)"},
        HandWorked{kPlane, "P,P", "R,R", "all_reduce(sum, dp); all_reduce(sum, tp)"},
        HandWorked{kPlane, "P,P", "S0,S0", "reduce_scatter(sum, dim 0, dp); reduce_scatter(sum, dim 0, tp)"},
        HandWorked{kPlane, "P,S0", "S0,R", "all_gather(dim 0, tp); reduce_scatter(sum, dim 0, dp)"},
        HandWorked{kPlane, "R,R", "S0,S0", "split(dim 0, dp); split(dim 0, tp)"},
        HandWorked{kMergedPlane, "S0,S0", "R,R", "all_gather(dim 0, tp); all_gather(dim 0, dp)"},
        HandWorked{kPlane, "S0,S0", "_S(0,2),S0",
                   "all_gather(dim 0, tp); all_gather(dim 0, dp); split(dim 0, dp); split(dim 0, tp)"}));

INSTANTIATE_TEST_SUITE_P(
    ThreeAxes, GreedyPlan,
    Values(HandWorked{kCube, "S0,S0,S0", "S0,R,S0",
                      "all_gather(dim 0, tp); all_gather(dim 0, dp); split(dim 0, tp)"},
           HandWorked{kCube, "S0,S1,P", "R,S1,R", "all_reduce(sum, tp); all_gather(dim 0, pp)"},
           HandWorked{kThin, "S0,P,P", "S0,R,R", "all_reduce(sum, dp); all_reduce(sum, tp)"},
           HandWorked{kThin, "R,S0,R", "S0,S0,R", "all_gather(dim 0, dp); split(dim 0, dp)"}));

TEST(GreedyPlan, IsPricedByTheModel) {
  const Plan plan =
      greedy_redistribution(task_of(kPlane, {24, 24}, {"S0,R"}, {"R,S0"}), default_alpha_beta(kPlane));
  const double gather = 7.2 + 0.5 * 24 * 24 * 4 * 1e6 / 87.7e9;
  const double split = 2.0 + 6 * 24 * 4 * 1e6 / 500e9;
  // Costs are sums of a few numbers. The two sides add them in different orders.
  EXPECT_NEAR(plan.cost, gather + split, 1e-9);
}

class OrdersOfTheirOwn : public ::testing::TestWithParam<bool> {};

TEST_P(OrdersOfTheirOwn, AreRefused) {
  const test::Sides own{"S0,S0", {{1, 0}}};
  const test::Sides none{"R,R"};
  EXPECT_TRUE(test::refuses(
      [&] {
        greedy_redistribution(task_of(kPlane, {8, 8}, GetParam() ? own : none, GetParam() ? none : own),
                              StepCounts{});
      },
      {"greedy_redistribution: ", "S(0)[1]S(0)[0]", "a shard order of its own", "plan_redistribution"}));
}

INSTANTIATE_TEST_SUITE_P(OfSourceAndTarget, OrdersOfTheirOwn, ::testing::Bool());

}  // namespace
}  // namespace funcol::greedy_test
