#include "sharding/cost_table.h"

#include <gtest/gtest.h>

#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::cost_table_test {
namespace {

using test::python;
using test::refuses;
using Table = std::vector<std::vector<double>>;

Table table(const char* sources, const char* targets) {
  return redistribute_cost_table(python(sources).cast<py::sequence>(), python(targets).cast<py::sequence>(),
                                 std::nullopt);
}

constexpr auto* kShard = "[spec(line, [Shard(0)], 1024, 1024)]";
constexpr auto* kReplicate = "[spec(line, [Replicate()], 1024, 1024)]";

TEST(CostTable, HasARowForEachSource) {
  const auto costs = table("[spec(line, [Shard(0)], 8, 4), spec(line, [Replicate()], 8, 4)]",
                           "[spec(line, [Shard(0)], 8, 4), spec(line, [Shard(1)], 8, 4), "
                           "spec(line, [Replicate()], 8, 4)]");
  ASSERT_EQ(costs.size(), 2);
  EXPECT_EQ(costs[0].size(), 3);
  EXPECT_EQ(costs[0][0], 0) << "of a tensor that stays";
  EXPECT_EQ(costs[1][2], 0) << "of a tensor that stays";
  EXPECT_EQ(costs[0][2], table("[spec(line, [Shard(0)], 8, 4)]", "[spec(line, [Replicate()], 8, 4)]")[0][0]);
}

TEST(CostTable, ChargesForCommunication) {
  EXPECT_GT(table(kShard, kReplicate)[0][0], table(kReplicate, kShard)[0][0]);
}

TEST(CostTable, FollowsTheModel) {
  const auto costs = redistribute_cost_table(python(kShard).cast<py::sequence>(),
                                             python(kReplicate).cast<py::sequence>(), StepCounts{});
  EXPECT_EQ(costs, Table{{2}}) << "one all_gather";
}

TEST(CostTable, OfNothingIsEmpty) {
  EXPECT_EQ(table("[]", "[]"), Table());
  EXPECT_EQ(table(kShard, "[]"), Table(1));
}

TEST(CostTable, RefusesDifferentTensors) {
  for (const char* const other : {
           "[spec(line, [Shard(0)], 1024, 1025)]",
           "[spec(line, [Shard(0)], 1024, 1024, dtype=torch.float16)]",
           "[spec(grid, [Shard(0), Replicate()], 1024, 1024)]",
       }) {
    EXPECT_TRUE(refuses<c10::ValueError>([&] { table(kShard, other); }, {"different tensors or meshes"}))
        << other;
  }
}

}  // namespace
}  // namespace funcol::python::cost_table_test
