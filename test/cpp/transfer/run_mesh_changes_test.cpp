#include "transfer/run_mesh_changes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "planner/mesh_changes.h"
#include "transfer/run_packed.h"
#include "transfer/thread_mesh.h"
#include "transfer/transfer_exchange.h"

namespace funcol::run_mesh_changes_test {
namespace {

using test::change_of;
using test::ranked;
using test::ThreadMesh;

constexpr int64_t kUnbounded = int64_t{1} << 40;
constexpr int64_t kNumRanks = 4;

struct Tensor {
  MeshChangeTask task;
  at::ScalarType dtype = at::kFloat;
};

Tensor tensor(RankedMesh src_mesh, const test::Sides& src, RankedMesh dst_mesh, const test::Sides& dst,
              const std::vector<int64_t>& shape, at::ScalarType dtype = at::kFloat) {
  return {change_of(std::move(src_mesh), src, std::move(dst_mesh), dst, shape,
                    static_cast<int64_t>(c10::elementSize(dtype))),
          dtype};
}

class Transfers : public testing::Test {
 protected:
  static std::shared_ptr<const TransferGroup> transport_of(const AxisGroups& groups) {
    TransferGroup transport;
    transport.group = groups.at(1).group;
    transport.ranks = {0, 1, 2, 3};
    return std::make_shared<const TransferGroup>(transport);
  }

  static at::Tensor held(const Tensor& tensor, const RankedMesh& mesh, const Layout& layout, int64_t rank) {
    const auto found = std::ranges::find(mesh.ranks, rank);
    if (found == mesh.ranks.end()) {
      return at::empty({0}, tensor.dtype);
    }
    int64_t numel = 1;
    for (const auto size : tensor.task.shape) {
      numel *= size;
    }
    return test::shard(at::arange(1, numel + 1, tensor.dtype).view(tensor.task.shape), layout, mesh.mesh,
                       mesh.mesh.coordinate(found - mesh.ranks.begin()));
  }

  // Moves them together among all ranks, and expects every rank's tensors.
  void expect_moved(const std::vector<Tensor>& tensors, bool async_op = false,
                    int64_t together_bytes = kUnbounded) {
    const auto results = world_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
      const auto transport = transport_of(groups);
      std::vector<TransferItem> items;
      for (const auto& one : tensors) {
        const auto transfer = plan_transfer(one.task);
        TransferProgram program;
        program.set_exchange(packed_transfer(transfer, *transport, coordinate[0]));
        program.bytes = transfer.loads.peak;
        items.push_back({std::make_shared<const TransferProgram>(std::move(program)),
                         held(one, one.task.src_mesh, one.task.src, coordinate[0])});
      }
      return run_mesh_changes(std::move(items), async_op, together_bytes);
    });
    for (int64_t rank = 0; rank < kNumRanks; ++rank) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto expected = held(tensors[i], tensors[i].task.dst_mesh, tensors[i].task.dst, rank);
        EXPECT_TRUE(at::equal(results[rank][i], expected)) << "tensor " << i << " of rank " << rank;
      }
    }
  }

  ThreadMesh world_{Mesh{{kNumRanks}, {}, {}}};
};

TEST_F(Transfers, OfOneDtypeTakeOneCollective) {
  expect_moved({tensor(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {4, 6}),
                tensor(ranked({2}), {"R"}, ranked({2}, 2), {"S0"}, {5}),
                tensor(ranked({2}), {"S1"}, ranked({2}, 2), {"R"}, {2, 3, 5}),
                tensor(ranked({2}), {"R"}, ranked({2}, 2), {"R"}, {})});
  EXPECT_EQ(world_.num_collectives(), 1U);
}

TEST_F(Transfers, SendNoMoreThanTheirPlans) {
  const std::vector<Tensor> tensors{
      tensor(ranked({2, 2}), {"S0,S1"}, ranked({4}), {"S1"}, {7, 9}),
      tensor(ranked({2, 2}), {"R,S1"}, ranked({4}), {"S0"}, {6, 5}),
      tensor(ranked({2, 2}), {"R,R"}, ranked({4}), {"R"}, {6, 5}),
  };
  expect_moved(tensors);
  int64_t planned = 0;
  for (const auto& one : tensors) {
    planned += plan_transfer(one.task).loads.total / one.task.itemsize;
  }
  EXPECT_EQ(world_.num_elements(), planned);
}

TEST_F(Transfers, OfSeveralDtypesTakeOneCollectiveEach) {
  expect_moved({tensor(ranked({4}), {"S0"}, ranked({2}, 1), {"S1"}, {4, 6}, at::kLong),
                tensor(ranked({4}), {"S0"}, ranked({2}, 1), {"S1"}, {4, 6}, at::kBFloat16),
                tensor(ranked({4}), {"S1"}, ranked({2}, 1), {"S0"}, {4, 6}, at::kLong)});
  EXPECT_EQ(world_.num_collectives(), 2U);
}

TEST_F(Transfers, TravelInSeveralCollectivesWithinABound) {
  const std::vector<Tensor> tensors(5, tensor(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {8, 8}));
  const auto peak = plan_transfer(tensors[0].task).loads.peak;
  expect_moved(tensors, /*async_op=*/false, 2 * peak);
  EXPECT_EQ(world_.num_collectives(), 3U);
}

TEST_F(Transfers, SendNothingWhereEachRankKeepsItsOwn) {
  expect_moved({tensor(ranked({4}), {"R"}, ranked({2, 2}), {"S1,S0"}, {5, 7})});
  EXPECT_EQ(world_.num_collectives(), 0U);
}

TEST_F(Transfers, MayBePending) {
  expect_moved({tensor(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {64, 64})}, /*async_op=*/true);
}

TEST_F(Transfers, SendFromTheBufferOfThoseThatHaveArrived) {
  const std::vector<Tensor> tensors{tensor(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {8, 8}),
                                    tensor(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {4, 6}),
                                    tensor(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {16, 8})};
  const auto results = world_.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    at::Tensor scratch;
    std::vector<const void*> buffers;
    std::vector<at::Tensor> moved;
    for (const auto& one : tensors) {
      auto exchange = std::make_shared<const PackedExchange>(
          packed_transfer(plan_transfer(one.task), *transport_of(groups), coordinate[0]));
      auto start =
          start_together({exchange}, {held(one, one.task.src_mesh, one.task.src, coordinate[0])}, &scratch);
      moved.push_back(start.outputs[0]);
      make_pending_collective(std::move(start))->settle();
      buffers.push_back(scratch.const_data_ptr());
    }
    EXPECT_EQ(buffers[0], buffers[1]);
    if (coordinate[0] < 2) {
      EXPECT_NE(buffers[1], buffers[2]) << "which is too small";
    }
    return moved;
  });
  for (int64_t rank = 0; rank < kNumRanks; ++rank) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(
          at::equal(results[rank][i], held(tensors[i], tensors[i].task.dst_mesh, tensors[i].task.dst, rank)));
    }
  }
}

class RandomTransfers : public Transfers, public testing::WithParamInterface<int> {};

TEST_P(RandomTransfers, GiveEachRankItsShards) {
  test::RandomLimits limits;
  limits.max_axes = 2;
  limits.max_dims = 3;
  limits.axis_sizes = {1, 2, 2, 4};
  test::RandomChange changes(static_cast<uint32_t>(GetParam()), limits, kNumRanks);
  std::vector<Tensor> tensors;
  while (tensors.size() < 6) {
    auto task = changes.make();
    task.itemsize = 4;
    const auto ranks = all_ranks(task);
    if (ranks.back() < kNumRanks) {
      tensors.push_back({std::move(task)});
    }
  }
  expect_moved(tensors);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTransfers, testing::Range(0, 20));

}  // namespace
}  // namespace funcol::run_mesh_changes_test
