#include "redistribute/plan_cache.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace funcol {
namespace {

Redistribution task(int64_t size, const char* src = "S0", const char* dst = "R") {
  const Mesh mesh{{2}, {}, {}};
  const std::vector<int64_t> shape{size};
  return {mesh, shape, 4, make_layout("test", parse_placements(src), {}, mesh, 1),
          make_layout("test", parse_placements(dst), {}, mesh, 1)};
}

class CachedPlan : public testing::Test {
 protected:
  CachedPlan() { forget_plans(); }
};

TEST_F(CachedPlan, IsThatOfTheSearch) {
  EXPECT_EQ(*cached_plan(task(8), StepCounts{}, {}), plan_redistribution(task(8), StepCounts{}));
}

TEST_F(CachedPlan, IsMadeOnceForEqualTasks) {
  EXPECT_EQ(cached_plan(task(8), {}, {}), cached_plan(task(8), {}, {}));
  EXPECT_EQ(num_cached_plans(), 1);
}

TEST_F(CachedPlan, IsAnotherForEveryPartOfATask) {
  auto wide = task(8);
  wide.itemsize = 8;
  auto large = task(8);
  large.mesh.sizes = {4};
  const auto plan = cached_plan(task(8), {}, {});
  EXPECT_NE(plan, cached_plan(task(9), {}, {}));
  EXPECT_NE(plan, cached_plan(task(8, "R", "S0"), {}, {}));
  EXPECT_NE(plan, cached_plan(wide, {}, {}));
  EXPECT_NE(plan, cached_plan(large, {}, {}));
  EXPECT_NE(plan, cached_plan(task(8), StepCounts{}, {}));
  EXPECT_NE(plan, cached_plan(task(8), {}, 1 << 20));
  EXPECT_EQ(num_cached_plans(), 7);
}

TEST_F(CachedPlan, IsForgottenWhenManyOthersFollow) {
  const auto first = cached_plan(task(1), {}, {});
  for (int64_t size = 2; size < 1100; ++size) {
    cached_plan(task(size), {}, {});
  }
  EXPECT_EQ(num_cached_plans(), 1024);
  EXPECT_NE(cached_plan(task(1), {}, {}), first);
}

TEST_F(CachedPlan, MayBeAskedForBySeveralThreads) {
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int64_t size = 1; size < 200; ++size) {
        EXPECT_EQ(cached_plan(task(size), {}, {})->shape[0], size);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_cached_plans(), 199);
}

}  // namespace
}  // namespace funcol
