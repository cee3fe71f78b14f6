#include "transfer/dtensors/cross_mesh.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "layout/tables.h"
#include "support/python.h"
#include "support/refuses.h"
#include "transfer/dtensors/redistribute_batch.h"

namespace funcol::python::cross_mesh_test {
namespace {

using test::num_calls;
using test::python;
using test::refuses;

// To the grid of the same ranks.
py::object changed(const char* dtensors, const char* placements, const RedistributionOptions& options = {}) {
  return redistribute_many(python(dtensors).cast<py::list>(), python("grid"),
                           python(placements).cast<py::list>(), py::none(), options);
}

TEST(RedistributeManyBetweenMeshes, TakesEachToItsPlacements) {
  const auto results = changed(
      "[dtensor(line, [Replicate()], torch.arange(12.0), 12), "
      "dtensor(line, [Shard(0)], torch.arange(2.0), 8)]",
      "[(Shard(0), Replicate()), (Shard(0), Shard(0))]");
  EXPECT_TRUE(python("[t._local_tensor.tolist() for t in x] == [[6, 7, 8, 9, 10, 11], [0, 1]]", results)
                  .cast<bool>());
  EXPECT_TRUE(python("x[0]._spec == spec(grid, [Shard(0), Replicate()], 12)", results).cast<bool>());
}

TEST(RedistributeManyBetweenMeshes, PlansOnceForEqualTensors) {
  clear_tables();
  const auto before = num_calls("redistribution_target");
  const auto pairs_before = num_calls("mesh_pair");
  const auto results = changed("[dtensor(line, [Replicate()], torch.ones(8), 8) for _ in range(3)]",
                               "[(Shard(0), Shard(0))] * 3");
  EXPECT_EQ(num_calls("redistribution_target"), before + 1);
  EXPECT_EQ(num_calls("mesh_pair"), pairs_before + 1);
  EXPECT_TRUE(python("x[0]._spec == x[2]._spec and x[0]._spec is not x[2]._spec", results).cast<bool>());
}

TEST(RedistributeManyBetweenMeshes, LeavesMasksAndSymbols) {
  EXPECT_FALSE(changed("[dtensor(line, [Replicate()], torch.ones(8), 8)]",
                       "[(Replicate(), _MaskPartial(offset_shape=torch.Size([8]), offset_dim=0))]"));
  EXPECT_FALSE(
      changed("[SimpleNamespace(_spec=symbolic(spec(line, [Replicate()], 8)), _local_tensor=torch.ones(8))]",
              "[(Shard(0), Replicate())]"));
}

TEST(RedistributeManyBetweenMeshes, RefusesTensorsOfSeveralMeshes) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] {
        changed(
            "[dtensor(line, [Replicate()], torch.ones(8), 8), "
            "dtensor(grid, [Replicate()] * 2, torch.ones(8), 8)]",
            "[(Shard(0), Shard(0))] * 2");
      },
      {"tensor 1"}));
}

TEST(RedistributeManyBetweenMeshes, RefusesALocalTensorOfAnotherShape) {
  EXPECT_TRUE(refuses<c10::ValueError>(
      [] { changed("[dtensor(line, [Shard(0)], torch.ones(3), 8)]", "[(Shard(0), Shard(0))]"); },
      {"shape [3]", "this rank holds [2]"}));
}

TEST(RedistributeManyBetweenMeshes, RefusesWhatDoesNotFit) {
  EXPECT_TRUE(refuses<c10::ValueError>(
      [] {
        changed("[dtensor(line, [Replicate()], torch.ones(8), 8)]", "[(Shard(0), Shard(0))]",
                {.max_bytes = 3});
      },
      {"stays within 3 bytes"}));
}

TEST(RedistributeLocalsBetweenMeshes, MovesLocalTensorsBetweenSpecs) {
  const auto results =
      redistribute_locals(python("[torch.arange(12.0)]").cast<py::list>(),
                          python("[spec(line, [Replicate()], 12)]").cast<py::list>(),
                          python("[spec(grid, [Replicate(), Shard(0)], 12)]").cast<py::list>(), {},
                          /*is_explicit=*/true);
  EXPECT_TRUE(python("x[0].tolist() == [6, 7, 8, 9, 10, 11]", results).cast<bool>());
}

TEST(RankedMeshOf, HasTheRanksInTheOrderOfTheMesh) {
  EXPECT_EQ(to_ranked_mesh(python("grid")).ranks, (std::vector<int64_t>{0, 1, 2, 3}));
}

}  // namespace
}  // namespace funcol::python::cross_mesh_test
