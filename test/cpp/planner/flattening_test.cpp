#include "planner/flattening.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "planner/search.h"
#include "planner/tasks.h"

namespace funcol::flattening_test {
namespace {

Plan planned(const Mesh& mesh, const std::string& src, const std::string& dst) {
  const auto task = test::task_of(mesh, {8, 8, 8, 8, 8}, {src}, {dst});
  return plan_redistribution(task, default_alpha_beta(mesh));
}

const Mesh kPart{{2, 2, 2, 2, 2}, {"a", "b", "c", "d", "e"}, {}};

TEST(Flattening, MakesOneStepOfARotation) {
  const auto plan = planned(kPart, "S0,S1,S2,S3,S4", "S1,S2,S3,S4,S0");
  ASSERT_GT(plan.steps.size(), 4U);
  EXPECT_EQ(flattening_of(plan), (Flattening{0b11111, 1}));
  EXPECT_EQ(flattening_hint(plan),
            "1 step in place of " + std::to_string(plan.steps.size()) +
                " with a process group of a, b, c, d, e together: call mesh[\"a\", \"b\", \"c\", \"d\", "
                "\"e\"]._flatten() first");
}

TEST(Flattening, NamesTheAxesThatCommunicateAlone) {
  const auto hint = flattening_hint(planned(kPart, "S0,S3,S1,R,R", "S1,S3,S0,R,R"));
  EXPECT_NE(hint.find("of a, c together: call mesh[\"a\", \"c\"]._flatten()"), std::string::npos) << hint;
}

TEST(Flattening, AsksForNamesOfTheDims) {
  const auto hint = flattening_hint(planned({{2, 2}, {}, {}}, "S0,S1", "S1,S0"));
  EXPECT_NE(hint.find("of 0, 1 together: name the dims of the mesh"), std::string::npos) << hint;
}

TEST(Flattening, IsNotAdvisedWhereItHelpsNothing) {
  EXPECT_EQ(flattening_hint(planned(kPart, "S0,R,R,R,R", "R,R,R,R,R")), "");        // one step
  EXPECT_EQ(flattening_hint(planned(kPart, "S0,P,R,R,R", "S1,R,R,R,R")), "");       // two of two kinds
  EXPECT_EQ(flattening_hint(planned({{2, 2}, {}, {0b11}}, "S0,S1", "S1,S0")), "");  // there is a group
}

}  // namespace
}  // namespace funcol::flattening_test
