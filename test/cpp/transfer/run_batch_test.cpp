#include "transfer/run_batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "async/async_tensor.h"
#include "planner/tasks.h"
#include "transfer/thread_mesh.h"

namespace funcol::run_batch_test {
namespace {

using test::task_of;
using test::ThreadMesh;

constexpr int64_t kUnbounded = int64_t{1} << 40;

struct Tensor {
  std::vector<int64_t> shape;
  std::string src;
  std::string dst;
  at::ScalarType dtype = at::kFloat;
};

class ManyTensors : public testing::Test {
 protected:
  Plan plan_of(const Tensor& tensor) const {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    return plan_redistribution(task_of(ranks_.mesh(), tensor.shape, {tensor.src}, {tensor.dst}, itemsize),
                               StepCounts{});
  }

  at::Tensor held(const Tensor& tensor, const Layout& layout, const Coordinate& coordinate) const {
    int64_t numel = 1;
    for (const auto size : tensor.shape) {
      numel *= size;
    }
    return test::shard(at::arange(1, numel + 1, tensor.dtype).view(tensor.shape), layout, ranks_.mesh(),
                       coordinate);
  }

  TransferItem item(const Tensor& tensor, const Coordinate& coordinate, const AxisGroups& groups) const {
    const auto plan = plan_of(tensor);
    return {
        std::make_shared<const TransferProgram>(std::make_shared<const Execution>(plan, groups, coordinate)),
        held(tensor, plan.src, coordinate)};
  }

  // Runs them together, and expects every rank's tensors.
  void expect_redistributed(const std::vector<Tensor>& tensors, bool async_op = false,
                            int64_t together_bytes = kUnbounded) const {
    const auto results = ranks_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
      std::vector<TransferItem> items;
      for (const auto& tensor : tensors) {
        items.push_back(item(tensor, coordinate, groups));
      }
      auto redistributed = run_batch(items, async_op, together_bytes);
      EXPECT_EQ(is_pending(redistributed[0]), async_op);
      return redistributed;
    });
    for (size_t rank = 0; rank < results.size(); ++rank) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto expected = held(tensors[i], plan_of(tensors[i]).dst, ranks_.coordinates()[rank]);
        EXPECT_TRUE(at::equal(results[rank][i], expected)) << "tensor " << i << " of rank " << rank;
      }
    }
  }

  ThreadMesh ranks_{Mesh{{3}, {}, {}}};
};

struct Move {
  const char* src;
  const char* dst;
};

class ManyOfOneKind : public ManyTensors, public testing::WithParamInterface<Move> {};

TEST_P(ManyOfOneKind, ShareOneCollective) {
  const auto& [src, dst] = GetParam();
  expect_redistributed({{{8, 6}, src, dst}, {{5, 3}, src, dst}, {{1, 2}, src, dst}});
  EXPECT_EQ(ranks_.num_collectives(), 1);
}

TEST_P(ManyOfOneKind, MayStayPending) {
  const auto& [src, dst] = GetParam();
  expect_redistributed({{{8, 6}, src, dst}, {{5, 3}, src, dst}}, /*async_op=*/true);
}

INSTANTIATE_TEST_SUITE_P(Kinds, ManyOfOneKind,
                         testing::Values(Move{"S0", "R"}, Move{"S1", "R"}, Move{"P", "S1"}, Move{"P", "R"},
                                         Move{"S0", "S1"}, Move{"_S(0, 2)", "S1"}));

TEST_F(ManyTensors, OfOneKindButOtherDimsShareACollective) {
  expect_redistributed({{{8, 6}, "S0", "R"}, {{5, 3}, "S1", "R"}});
  EXPECT_EQ(ranks_.num_collectives(), 1);
}

TEST_F(ManyTensors, OfOtherKindsHaveTheirOwn) {
  expect_redistributed({{{6, 6}, "S0", "R"}, {{6, 6}, "P", "R"}, {{6, 6}, "S0", "R", at::kLong}});
  EXPECT_EQ(ranks_.num_collectives(), 3);
}

TEST_F(ManyTensors, GoTogetherUpToTheBoundOfBytes) {
  const Tensor tensor{{6, 6}, "S0", "R"};
  expect_redistributed({tensor, tensor, tensor}, /*async_op=*/false, 2 * plan_of(tensor).peak_bytes);
  EXPECT_EQ(ranks_.num_collectives(), 2);
}

TEST_F(ManyTensors, OfNoStepsAreReturnedAsTheyAre) {
  const auto one = item({{6}, "S0", "S0"}, {0}, ranks_.groups(0));
  EXPECT_TRUE(run_batch({one}, /*async_op=*/true, kUnbounded)[0].is_same(one.local));
}

TEST_F(ManyTensors, AreCheckedBeforeAnythingIsSent) {
  auto good = item({{6}, "S0", "R"}, {0}, ranks_.groups(0));
  auto bad = good;
  bad.local = at::ones({5});
  EXPECT_THROW(run_batch({good, bad}, /*async_op=*/false, kUnbounded), c10::ValueError);
  EXPECT_EQ(ranks_.num_collectives(), 0);
}

TEST_F(ManyTensors, TravelTogetherButOnlySomeNeedGradients) {
  const auto results = ranks_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    auto first = item({{6}, "S0", "R"}, coordinate, groups);
    first.local.requires_grad_();
    return run_batch({first, item({{6}, "S0", "R"}, coordinate, groups)}, /*async_op=*/false, kUnbounded);
  });
  EXPECT_EQ(ranks_.num_collectives(), 1);
  EXPECT_TRUE(results[0][0].requires_grad());
  EXPECT_FALSE(results[0][1].requires_grad());
}

TEST_F(ManyTensors, OfNoneAreNone) { EXPECT_TRUE(run_batch({}, /*async_op=*/false, kUnbounded).empty()); }

}  // namespace
}  // namespace funcol::run_batch_test
