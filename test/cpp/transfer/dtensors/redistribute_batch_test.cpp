#include "transfer/dtensors/redistribute_batch.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "layout/tables.h"
#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::redistribute_batch_test {
namespace {

using test::num_calls;
using test::python;
using test::refuses;

py::object many(const char* dtensors, const char* placements) {
  return redistribute_many(python(dtensors).cast<py::list>(), py::none(), python(placements).cast<py::list>(),
                           py::none(), {});
}

py::list locals(const char* locals, const char* sources, const char* targets) {
  return redistribute_locals(python(locals).cast<py::list>(), python(sources).cast<py::list>(),
                             python(targets).cast<py::list>(), {}, /*is_explicit=*/true);
}

TEST(RedistributeMany, MovesEachToItsPlacements) {
  const auto results = many(
      "[dtensor(line, [Replicate()], torch.arange(10.0), 10), "
      "dtensor(line, [Replicate()], torch.arange(8.0).view(1, 8), 1, 8)]",
      "[(Shard(0),), (Shard(1),)]");
  EXPECT_TRUE(python("[t._local_tensor.tolist() for t in x] == [[9], [[6, 7]]]", results).cast<bool>());
  EXPECT_TRUE(python("x[0]._spec == spec(line, [Shard(0)], 10)", results).cast<bool>());
  EXPECT_TRUE(python("x[1]._spec == spec(line, [Shard(1)], 1, 8)", results).cast<bool>());
}

TEST(RedistributeMany, AsksOnceForEqualTargets) {
  clear_tables();
  const auto before = num_calls("redistribution_target");
  const auto results =
      many("[dtensor(line, [Replicate()], torch.ones(10), 10) for _ in range(3)]", "[(Shard(0),)] * 3");
  EXPECT_EQ(num_calls("redistribution_target"), before + 1);
  EXPECT_TRUE(python("x[0]._spec == x[2]._spec and x[0]._spec is not x[2]._spec", results).cast<bool>());
}

TEST(RedistributeMany, LeavesMasksAndSymbolsToOneByOne) {
  EXPECT_FALSE(many("[dtensor(line, [Replicate()], torch.ones(8), 8)]",
                    "[(_MaskPartial(offset_shape=torch.Size([8]), offset_dim=0),)]"));
  EXPECT_FALSE(
      many("[SimpleNamespace(_spec=symbolic(spec(line, [Replicate()], 8)), _local_tensor=torch.ones(8))]",
           "[(Shard(0),)]"));
}

TEST(RedistributeMany, RefusesTwoMeshes) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] {
        many(
            "[dtensor(line, [Replicate()], torch.ones(8), 8), "
            "dtensor(grid, [Replicate()] * 2, torch.ones(8), 8)]",
            "[(Shard(0),), (Shard(0), Shard(0))]");
      },
      {"tensor 1"}));
}

TEST(RedistributeLocals, MovesLocalTensorsBetweenSpecs) {
  const auto results = locals("[torch.arange(10.0), torch.arange(4.0)]",
                              "[spec(line, [Replicate()], 10), spec(line, [Replicate()], 4)]",
                              "[spec(line, [Shard(0)], 10), spec(line, [Shard(0)], 4)]");
  EXPECT_TRUE(python("[t.tolist() for t in x] == [[9], [3]]", results).cast<bool>());
}

TEST(RedistributeLocals, RefusesTargetsOnSeveralMeshes) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] {
        locals("[torch.ones(8)] * 2", "[spec(line, [Replicate()], 8)] * 2",
               "[spec(line, [Shard(0)], 8), spec(grid, [Shard(0), Shard(0)], 8)]");
      },
      {"target 1"}));
}

}  // namespace
}  // namespace funcol::python::redistribute_batch_test
