#include "planner/mesh_change.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "planner/mesh_changes.h"

namespace funcol::mesh_change_test {
namespace {

using test::change_of;
using test::ranked;
using ::testing::Range;

MeshChangeCosts default_costs(const MeshChangeTask& task) {
  return {default_alpha_beta(task.src_mesh.mesh), default_alpha_beta(task.dst_mesh.mesh)};
}

MeshChange planned(const MeshChangeTask& task) { return plan_mesh_change(task, default_costs(task)); }

// Returns the error message if no plan stays within `max_bytes`, else "".
std::string refusal(const MeshChangeTask& task, int64_t max_bytes) {
  try {
    const auto change = plan_mesh_change(task, default_costs(task), max_bytes);
    EXPECT_LE(change.peak_bytes, max_bytes) << test::described(task);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(MeshChange, IsACollectiveOnTheCommonMeshWhereThatIsCheaper) {
  const auto change = planned(change_of(ranked({4, 2}), {"S0,S1"}, ranked({8}), {"S0"}, {64, 64}));
  EXPECT_FALSE(change.transfer.has_value());
  ASSERT_TRUE(change.before.has_value());
  ASSERT_EQ(change.before->steps.size(), 1U);
  EXPECT_EQ(to_string(change.before->steps[0], change.common->mesh), "all_to_all(dim 1 -> 0, 1)");
}

TEST(MeshChange, HasNoStepsWhereEachRankHoldsWhatItWants) {
  const auto change = planned(change_of(ranked({4, 2}), {"S0,S0"}, ranked({8}), {"S0"}, {64, 64}));
  EXPECT_TRUE(change.before->steps.empty());
  EXPECT_EQ(change.cost, 0);
}

TEST(MeshChange, DoesNotGatherASmallTensorEverywhere) {
  const auto task = change_of(ranked({4}), {"S0"}, ranked({2, 2}, 0, {0b11}), {"R,S1"}, {256, 256});
  EXPECT_EQ(to_string(planned(task)), "S(0) => RS(1)");
}

TEST(MeshChange, IsATransferBetweenOtherRanks) {
  const auto change = planned(change_of(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {64, 64}));
  EXPECT_EQ(to_string(change), "S(0) => S(1)");
  EXPECT_GT(change.cost, 0);
}

TEST(MeshChange, ReducesPartialValuesBeforeTheyLeave) {
  const auto change = planned(change_of(ranked({2}), {"P"}, ranked({2}, 2), {"S0"}, {4096, 4096}));
  EXPECT_EQ(to_string(change), "P(sum)->S(0) | S(0) => S(0)");
}

TEST(MeshChange, ReducesAScalarToTheWhole) {
  const auto change = planned(change_of(ranked({2}), {"P(max)"}, ranked({2}, 2), {"R"}, {}));
  EXPECT_EQ(to_string(change), "P(max)->R | R => R");
}

TEST(MeshChange, MakesPartialValuesOnTheTargetMesh) {
  const auto change = planned(change_of(ranked({2}), {"S0"}, ranked({2, 2}, 2), {"P,S1"}, {64, 64}));
  EXPECT_EQ(to_string(change), "S(0) => S(0)S(1) | S(0)S(1)->P(sum)S(1)");
}

TEST(MeshChange, GathersOnTheTargetMeshWhereFewRanksWouldSendToMany) {
  const auto task = change_of(ranked({2}), {"S0"}, ranked({16}, 2), {"R"}, {4096, 4096});
  EXPECT_EQ(to_string(planned(task)), "S(0) => S(0) | S(0)->R");
  const auto small = change_of(ranked({2}), {"S0"}, ranked({16}, 2), {"R"}, {16, 4});
  EXPECT_EQ(to_string(planned(small)), "S(0) => R");
}

TEST(MeshChange, CountsStepsUnderTheModelOfSteps) {
  const auto task = change_of(ranked({2}), {"P"}, ranked({2}, 2), {"S0"}, {64, 64});
  EXPECT_EQ(plan_mesh_change(task, {StepCounts{}, StepCounts{}}).cost, 3);  // a reduce_scatter, a transfer
}

TEST(MeshChange, StaysWithinTheBytesOfARank) {
  const auto task = change_of(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {8, 8}, 1);
  EXPECT_EQ(plan_mesh_change(task, default_costs(task), 64).peak_bytes, 64);
  EXPECT_EQ(refusal(task, 63),
            "plan_mesh_change: no plan from S(0) to S(1) stays within 63 bytes a rank. The least that a plan "
            "takes is 64.");
}

// The tensor on the source mesh is held while partial values are made on the target mesh.
TEST(MeshChange, CountsThePartsOfAPlanTogether) {
  auto task = change_of(ranked({2}), {"S0"}, ranked({2}), {"P"}, {8, 8}, 1);
  task.dst_mesh.ranks = {1, 0};
  EXPECT_EQ(planned(task).peak_bytes, 160);
  EXPECT_EQ(refusal(task, 127),
            "plan_mesh_change: no plan from S(0) to P(sum) stays within 127 bytes a rank. The least that a "
            "plan takes is 128.");
  const auto change = plan_mesh_change(task, default_costs(task), 128);
  EXPECT_EQ(to_string(change), "S(0) => S(0) | S(0)->P(sum)");
  EXPECT_EQ(change.peak_bytes, 32 + 32 + 64);
}

TEST(MeshChange, PassesOnWhyThereIsNoPlan) {
  auto task = change_of(ranked({2}), {"R"}, ranked({2}, 2), {"R"}, {8});
  task.src.placements[0] = Placement::norm_partial({2, true});
  EXPECT_THROW(planned(task), std::invalid_argument);
}

using Matrix = std::vector<std::vector<int64_t>>;

TEST(MeshChange, HasAMatrixOfTheBytesOfACollective) {
  const auto change = planned(change_of(ranked({2, 2}), {"S0,S1"}, ranked({4}), {"S0"}, {4, 4}, 1));
  EXPECT_FALSE(change.transfer.has_value());
  EXPECT_EQ(bytes_matrix(change), (Matrix{{0, 2, 0, 0}, {2, 0, 0, 0}, {0, 0, 0, 2}, {0, 0, 2, 0}}));
  EXPECT_EQ(least_busiest_bytes(change.task), 2);
}

TEST(MeshChange, HasAMatrixOfTheBytesOfAllItsParts) {
  const auto change = planned(change_of(ranked({2}), {"P"}, ranked({1}, 2), {"R"}, {1024, 1024}, 1));
  EXPECT_EQ(to_string(change), "P(sum)->S(0) | S(0) => R");
  const int64_t half = int64_t{512} * 1024;
  EXPECT_EQ(bytes_matrix(change), (Matrix{{0, half, half}, {half, 0, half}, {0, 0, 0}}));
  EXPECT_FALSE(least_busiest_bytes(change.task).has_value());
}

TEST(MeshChange, CountsAnAllReduceTwice) {
  const auto change = planned(change_of(ranked({2}), {"P"}, ranked({2, 1}), {"R,R"}, {8}, 1));
  EXPECT_EQ(to_string(change), "P(sum)->R");
  EXPECT_EQ(bytes_matrix(change), (Matrix{{0, 8}, {8, 0}}));
}

class RandomMeshChange : public ::testing::TestWithParam<int> {};

// The parts of a plan begin and end where the plan does, and each begins where the one before ends.
TEST_P(RandomMeshChange, IsAChain) {
  test::RandomLimits limits;
  limits.max_axes = 3;
  limits.one_op = true;
  const bool has_partials = GetParam() % 2 == 0;
  const auto task = test::RandomChange(static_cast<uint32_t>(GetParam()), limits, 12, has_partials).make();
  SCOPED_TRACE(test::described(task));
  const auto change = planned(task);
  if (change.common.has_value()) {
    EXPECT_FALSE(change.transfer.has_value() || change.after.has_value());
    return;
  }
  ASSERT_TRUE(change.transfer.has_value());
  const auto& moved = change.transfer->task;
  EXPECT_EQ(moved.src, change.before.has_value() ? change.before->dst : task.src);
  EXPECT_EQ(moved.dst, change.after.has_value() ? change.after->src : task.dst);
  EXPECT_TRUE(!change.before.has_value() || change.before->src == task.src);
  EXPECT_TRUE(!change.after.has_value() || change.after->dst == task.dst);
  const auto& loads = change.transfer->loads;
  EXPECT_EQ(loads.busiest_sender, loads.bound);
}

TEST_P(RandomMeshChange, IsPlannedWithinTheLeastBoundAndRefusedAByteBelowIt) {
  test::RandomLimits limits;
  limits.max_axes = 3;
  limits.one_op = true;
  const auto task = test::RandomChange(static_cast<uint32_t>(GetParam()), limits, 12, true).make();
  SCOPED_TRACE(test::described(task));
  const auto text = refusal(task, -1);
  const auto least = std::stoll(text.substr(text.rfind(' ') + 1));
  EXPECT_EQ(refusal(task, least), "");
  const auto below = refusal(task, least - 1);
  EXPECT_EQ(below.substr(below.rfind(' ')), text.substr(text.rfind(' ')));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomMeshChange, Range(0, 200));

}  // namespace
}  // namespace funcol::mesh_change_test
