#include "transfer/executor.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "async/async_tensor.h"
#include "planner/tasks.h"
#include "support/refuses.h"
#include "transfer/packed_exchange.h"
#include "transfer/thread_mesh.h"

namespace funcol::executor_test {
namespace {

using test::refuses;
using test::task_of;
using test::ThreadMesh;

const Mesh kOneAxis{{2}, {"tp"}, {}};

Plan plan_of(const Mesh& mesh, const std::vector<int64_t>& shape, const std::string& src,
             const std::string& dst) {
  return plan_redistribution(task_of(mesh, shape, {src}, {dst}), StepCounts{});
}

// Sizes of the mesh, placements before and after, shape.
using Case = std::tuple<std::vector<int64_t>, std::string, std::string, std::vector<int64_t>>;

class Executions : public testing::TestWithParam<Case> {};

TEST_P(Executions, BringEveryRankItsTensor) {
  const auto& [sizes, src, dst, shape] = GetParam();
  const ThreadMesh ranks({sizes, {}, {(AxisSet{1} << sizes.size()) - 1}});
  const auto plan = plan_of(ranks.mesh(), shape, src, dst);
  const auto whole = at::arange(shape[0] * shape[1], at::kFloat).view(shape);
  const auto held = [&](const Layout& layout, const Coordinate& coordinate) {
    return test::shard(whole, layout, ranks.mesh(), coordinate);
  };
  const auto results = ranks.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    const auto local = held(plan.src, coordinate);
    const Execution execution(plan, groups, coordinate);
    return std::vector{execution.run(local, /*async_op=*/false), execution.run(local, /*async_op=*/true)};
  });
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const auto expected = held(plan.dst, ranks.coordinates()[rank]);
    EXPECT_TRUE(at::equal(results[rank][0], expected)) << to_string(plan) << " on rank " << rank;
    EXPECT_TRUE(at::equal(results[rank][1], expected)) << to_string(plan) << " on rank " << rank;
  }
}

const std::vector<std::vector<int64_t>> kShapes{{8, 6}, {5, 3}, {1, 2}, {0, 4}};

INSTANTIATE_TEST_SUITE_P(OneAxis, Executions,
                         testing::Combine(testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{3}),
                                          testing::Values("R", "S0", "S1", "P", "_S(0, 2)"),
                                          testing::Values("R", "S0", "S1"), testing::ValuesIn(kShapes)));

INSTANTIATE_TEST_SUITE_P(TwoAxes, Executions,
                         testing::Combine(testing::Values(std::vector<int64_t>{2, 2}),
                                          testing::Values("S0,S0", "R,S1", "P,S0", "P,P"),
                                          testing::Values("R,R", "S0,S1", "S1,R", "S1,S1"),
                                          testing::ValuesIn(kShapes)));

TEST(Execution, WithoutStepsReturnsTheTensorItself) {
  const auto local = at::ones({2, 6});
  const Execution execution(plan_of(kOneAxis, {4, 6}, "S0", "S0"), {}, {0});
  EXPECT_TRUE(execution.run(local, /*async_op=*/true).is_same(local));
}

TEST(Execution, OfALocalStepReturnsMemoryOfItsOwn) {
  const auto local = at::arange(8).view({4, 2});
  const auto result = Execution(plan_of(kOneAxis, {4, 2}, "R", "S0"), {}, {1}).run(local, /*async_op=*/false);
  EXPECT_TRUE(at::equal(result, local.narrow(0, 2, 2)));
  EXPECT_FALSE(result.is_alias_of(local));
}

TEST(Execution, ToAPartialPutsZerosAroundTheShard) {
  const auto result =
      Execution(plan_of(kOneAxis, {4}, "S0", "P"), {}, {1}).run(at::ones({2}), /*async_op=*/false);
  EXPECT_TRUE(at::equal(result, at::tensor({0.F, 0.F, 1.F, 1.F})));
}

TEST(Execution, IsPendingOnlyIfItMayBe) {
  const auto plan = plan_of(kOneAxis, {4, 2}, "S0", "R");
  const ThreadMesh ranks(kOneAxis);
  ranks.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    const Execution execution(plan, groups, coordinate);
    EXPECT_FALSE(is_pending(execution.run(at::ones({2, 2}), /*async_op=*/false)));
    EXPECT_TRUE(is_pending(execution.run(at::ones({2, 2}), /*async_op=*/true)));
    return std::vector<at::Tensor>();
  });
}

thread_local int num_operators = 0;  // of funcol that an observer has seen on this thread

std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction& function) {
  num_operators += std::string_view(function.name()).starts_with("funcol::") ? 1 : 0;
  return nullptr;
}

TEST(Execution, ShowsAnObserverItsCollectives) {
  const ThreadMesh ranks(kOneAxis);
  for (const auto* source : {"S0", "P"}) {
    const auto plan = plan_of(kOneAxis, {4, 2}, source, "R");
    const auto num_seen = ranks.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
      const Execution execution(plan, groups, coordinate);
      const auto local = at::ones(execution.shape_before());
      num_operators = 0;
      const auto handle = at::addThreadLocalCallback(
          at::RecordFunctionCallback(count_operator).scopes({at::RecordScope::FUNCTION}));
      const auto seen = execution.run(local, /*async_op=*/false);
      at::removeCallback(handle);
      EXPECT_TRUE(at::equal(seen, execution.run(local, /*async_op=*/false)));
      return std::vector{at::scalar_tensor(num_operators)};
    });
    EXPECT_GT(num_seen[0][0].item<int>(), 0) << to_string(plan);
  }
}

TEST(Execution, RecordsTheGradientOfItsSteps) {
  const auto plan = plan_of(kOneAxis, {4, 2}, "S0", "S1");
  const ThreadMesh ranks(kOneAxis);
  const auto gradients = ranks.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    const auto local = at::ones({2, 2}).requires_grad_();
    const auto result = Execution(plan, groups, coordinate).run(local, /*async_op=*/false);
    result.backward(at::full_like(result, static_cast<double>(coordinate[0])));
    return std::vector{local.grad()};
  });
  const auto expected = at::tensor({0.F, 1.F}).expand({2, 2});
  EXPECT_TRUE(at::equal(gradients[0][0], expected) && at::equal(gradients[1][0], expected));
}

TEST(Execution, RefusesATensorOfAnotherShapeBeforeItSends) {
  const ThreadMesh ranks(kOneAxis);
  const Execution execution(plan_of(kOneAxis, {4, 6}, "S0", "R"), ranks.groups(0), {0});
  EXPECT_TRUE(refuses<c10::ValueError>(
      [&] {
        execution.run(at::ones({3, 6}), /*async_op=*/false);
      },
      {"shape [3, 6]", "[2, 6] of a tensor of shape [4, 6]", "S(0)"}));
  EXPECT_EQ(ranks.num_collectives(), 0);
}

TEST(Execution, RefusesAReductionOfTheWrongDtypeBeforeItSends) {
  const ThreadMesh ranks(kOneAxis);
  const Execution execution(plan_of(kOneAxis, {4}, "P(band)", "R"), ranks.groups(0), {0});
  EXPECT_THROW(execution.check(at::ones({4})), c10::Error);
  EXPECT_NO_THROW(execution.check(at::ones({4}, at::kLong)));
}

TEST(Execution, NeedsAGroupForEachStepThatSends) {
  EXPECT_TRUE(refuses<c10::ValueError>([] { Execution(plan_of(kOneAxis, {4}, "S0", "R"), {}, {0}); },
                                       {"no process group for all_gather(dim 0, tp)"}));
}

TEST(Execution, StepsOfOtherSizesHaveTheSameSignature) {
  const AxisGroups groups{{0b1, {"tp", {}}}};
  const auto id = [&](const std::vector<int64_t>& shape, const char* src, const char* dst) {
    return Execution(plan_of(kOneAxis, shape, src, dst), groups, {0}).steps_id();
  };
  EXPECT_EQ(id({4, 6}, "S0", "R"), id({5, 3}, "S1", "R"));
  EXPECT_NE(id({4, 6}, "S0", "R"), id({4, 6}, "P", "R"));
  EXPECT_NE(id({4, 6}, "P", "R"), id({4, 6}, "P(max)", "R"));
}

TEST(SharedSignature, LivesAsLongAsSomebodyHoldsIt) {
  const auto before = num_shared_signatures();
  auto one = shared_signature("all_gather of a group that comes and goes");
  auto equal = shared_signature("all_gather of a group that comes and goes");
  EXPECT_EQ(one, equal);
  EXPECT_EQ(num_shared_signatures(), before + 1);
  one.reset();
  EXPECT_EQ(num_shared_signatures(), before + 1);
  equal.reset();
  EXPECT_EQ(num_shared_signatures(), before);
}

class Masks : public testing::Test {
 protected:
  Masks() {
    plan_.mesh = kOneAxis;
    plan_.shape = {3};
    plan_.src = {{Placement::partial(PartialOp::kSum, /*mask=*/1)}, {}};
    plan_.dst = {{Placement::partial()}, {}};
    plan_.steps = {{StepKind::kApplyMask, 0b1, plan_.src, plan_.dst, {3}}};
  }

  Plan plan_;
};

TEST_F(Masks, AreAppliedByTheirHook) {
  MaskHooks masks;
  masks.apply = [](const at::Tensor& tensor, int64_t axis) { return tensor * 2 + axis; };
  const auto result = Execution(plan_, {}, {0}).run(at::ones({3}), /*async_op=*/false, masks);
  EXPECT_TRUE(at::equal(result, at::full({3}, 2.F)));
}

TEST_F(Masks, WithoutAHookAreRefused) {
  const Execution execution(plan_, {}, {0});
  EXPECT_TRUE(refuses<c10::NotImplementedError>([&] { execution.run(at::ones({3}), /*async_op=*/false); },
                                                {"masked partial"}));
}

}  // namespace
}  // namespace funcol::executor_test
