#include "transfer/bucket.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "planner/tasks.h"
#include "transfer/run_batch.h"
#include "transfer/thread_mesh.h"
#include "transfer/transfer_exchange.h"

namespace funcol::bucket_test {
namespace {

using test::task_of;
using test::ThreadMesh;

constexpr int64_t kUnbounded = int64_t{1} << 40;

at::Tensor whole_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const auto size : shape) {
    numel *= size;
  }
  return at::arange(1, numel + 1, at::kFloat).view(shape);
}

struct Case {
  std::vector<int64_t> shape;
  std::string layout;
};

// Three ranks in a row.
class Buckets : public testing::Test {
 protected:
  Layout layout_of(const Case& one) const {
    return make_layout("test", parse_placements(one.layout), {}, ranks_.mesh(),
                       static_cast<int64_t>(one.shape.size()));
  }

  at::Tensor held(const Case& one, const Coordinate& coordinate) const {
    return test::shard(whole_of(one.shape), layout_of(one), ranks_.mesh(), coordinate);
  }

  // By a plan, for all ranks.
  TransferItem replicated(const Case& one, const Coordinate& coordinate, const AxisGroups& groups) const {
    const auto plan =
        plan_redistribution(task_of(ranks_.mesh(), one.shape, {one.layout}, {"R"}, 4), StepCounts{});
    return {
        std::make_shared<const TransferProgram>(std::make_shared<const Execution>(plan, groups, coordinate)),
        held(one, coordinate)};
  }

  TransferItem to_or_from(const Case& one, int64_t holder, bool is_back, const Coordinate& coordinate,
                          const AxisGroups& groups) const {
    const RankedMesh every{ranks_.mesh(), {0, 1, 2}};
    const RankedMesh alone{{{1}, {}, {}}, {holder}};
    const Layout whole{{Placement::replicate()}, {}};
    MeshChangeTask task{every, layout_of(one), alone, whole, one.shape, 4};
    if (is_back) {
      task = {alone, whole, every, layout_of(one), one.shape, 4};
    }
    TransferProgram program;
    program.set_exchange(packed_transfer(plan_transfer(task), {groups.at(1).group, every.ranks},
                                         coordinate[0],
                                         /*keeps_in_buffer=*/true));
    const bool holds = coordinate[0] == holder;
    return {std::make_shared<const TransferProgram>(std::move(program)), !is_back ? held(one, coordinate)
                                                                         : holds  ? whole_of(one.shape)
                                                                                  : at::empty({0})};
  }

  const std::vector<Case> cases_{{{8, 6}, "S0"}, {{5, 3}, "S1"}, {{1, 2}, "S0"}, {{0, 4}, "S0"}, {{7}, "S0"}};
  ThreadMesh ranks_{Mesh{{3}, {}, {}}};
};

TEST_F(Buckets, GiveTheirTensorsOneByOneAfterOneCollective) {
  const auto results = ranks_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    std::vector<TransferItem> items;
    for (const auto& one : cases_) {
      items.push_back(replicated(one, coordinate, groups));
    }
    Bucket bucket(std::move(items));
    bucket.start();
    std::vector<at::Tensor> taken;
    for (size_t i = 0; i < cases_.size(); ++i) {
      taken.push_back(bucket.next());
    }
    EXPECT_FALSE(bucket.next().defined());
    return taken;
  });
  EXPECT_EQ(ranks_.num_collectives(), 1);
  for (const auto& of_rank : results) {
    for (size_t i = 0; i < cases_.size(); ++i) {
      EXPECT_TRUE(at::equal(of_rank[i], whole_of(cases_[i].shape))) << "tensor " << i;
    }
  }
}

TEST_F(Buckets, OfOneTensorThatLiesInOrderGiveTheirBuffer) {
  ranks_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    const Case even{{6, 4}, "S0"};
    Bucket bucket({replicated(even, coordinate, groups)});
    bucket.start();
    const auto taken = bucket.next();
    EXPECT_TRUE(at::equal(taken, whole_of(even.shape)));
    EXPECT_EQ(taken.storage().nbytes(), size_t{24 * 4});
    return std::vector<at::Tensor>();
  });
}

TEST_F(Buckets, MixPartialsShardsAndReplicas) {
  const std::vector<Case> mixed{{{4, 2}, "P"}, {{4, 2}, "R"}, {{4, 2}, "S1"}, {{3, 3}, "P"}};
  const auto results = ranks_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    std::vector<TransferItem> items;
    for (const auto& one : mixed) {
      items.push_back(replicated(one, coordinate, groups));
    }
    Bucket bucket(std::move(items));
    bucket.start();
    std::vector<at::Tensor> taken;
    for (size_t i = 0; i < mixed.size(); ++i) {
      taken.push_back(bucket.next());
    }
    return taken;
  });
  EXPECT_EQ(ranks_.num_collectives(), 2);
  for (const auto& of_rank : results) {
    for (size_t i = 0; i < mixed.size(); ++i) {
      EXPECT_TRUE(at::equal(of_rank[i], whole_of(mixed[i].shape))) << "tensor " << i;
    }
  }
}

TEST_F(Buckets, BringTensorsToTheirHoldersAtTheBytesOfAGather) {
  const auto results = ranks_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    std::vector<TransferItem> items;
    for (size_t i = 0; i < cases_.size(); ++i) {
      items.push_back(to_or_from(cases_[i], static_cast<int64_t>(i % 3), false, coordinate, groups));
    }
    return run_batch(items, /*async_op=*/false, kUnbounded);
  });
  EXPECT_EQ(ranks_.num_collectives(), 1);
  int64_t numel = 0;
  for (size_t i = 0; i < cases_.size(); ++i) {
    numel += whole_of(cases_[i].shape).numel();
    for (size_t rank = 0; rank < results.size(); ++rank) {
      const auto& result = results[rank][i];
      if (rank == i % 3) {
        EXPECT_TRUE(at::equal(result, whole_of(cases_[i].shape))) << "tensor " << i;
      } else {
        EXPECT_EQ(result.numel(), 0);
      }
    }
  }
  EXPECT_EQ(ranks_.num_elements(), numel);  // each shard once
}

TEST_F(Buckets, BringTensorsBackAsShardsAndReplicas) {
  auto cases = cases_;
  cases.push_back({{2, 2}, "R"});
  cases.push_back({{}, "R"});
  const auto results = ranks_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    std::vector<TransferItem> items;
    for (size_t i = 0; i < cases.size(); ++i) {
      items.push_back(to_or_from(cases[i], static_cast<int64_t>(i % 3), true, coordinate, groups));
    }
    return run_batch(items, /*async_op=*/true, kUnbounded);
  });
  EXPECT_EQ(ranks_.num_collectives(), 1);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    for (size_t i = 0; i < cases.size(); ++i) {
      EXPECT_TRUE(at::equal(results[rank][i], held(cases[i], ranks_.coordinates()[rank]))) << "tensor " << i;
    }
  }
}

}  // namespace
}  // namespace funcol::bucket_test
