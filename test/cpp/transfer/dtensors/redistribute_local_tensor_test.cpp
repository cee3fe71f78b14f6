#include "transfer/dtensors/redistribute_local_tensor.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::redistribute_local_tensor_test {
namespace {

using test::python;
using test::refuses;

py::object moved(const char* local, const char* source, const char* target, bool is_lenient = false) {
  LocalRedistribution how;
  how.is_lenient = is_lenient;
  return redistribute_local(python(local), python(source), python(target), how);
}

TEST(RedistributeLocal, CutsOutThisRanksPart) {
  const auto local =
      moved("torch.arange(10.0)", "spec(line, [Replicate()], 10)", "spec(line, [Shard(0)], 10)");
  EXPECT_EQ(python("x.tolist()", local).cast<std::vector<double>>(), std::vector<double>{9});
}

TEST(RedistributeLocal, KeepsTheTensorOutsideOfTheMesh) {
  const auto local = python("torch.ones(4)");
  const auto mesh = python("DeviceMesh('cpu', [0, 1])");
  const auto result = redistribute_local(local, python("spec(x, [Replicate()], 4)", mesh),
                                         python("spec(x, [Shard(0)], 4)", mesh), {});
  EXPECT_TRUE(result.is(local));
}

TEST(RedistributeLocal, RefusesTwoMeshes) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] {
        moved("torch.ones(8)", "spec(line, [Replicate()], 8)", "spec(grid, [Shard(0), Replicate()], 8)");
      },
      {"one DeviceMesh only"}));
}

TEST(RedistributeLocal, RefusesPlacementsWithRulesOfTheirOwn) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] { moved("torch.ones(8)", "spec(line, [OwnPartial()], 8)", "spec(line, [Shard(0)], 8)"); },
      {"OwnPartial"}));
}

TEST(RedistributeLocal, RefusesAnotherShape) {
  EXPECT_TRUE(refuses<c10::ValueError>(
      [] { moved("torch.ones(4)", "spec(line, [Replicate()], 8)", "spec(line, [Shard(0)], 8)"); }, {"4"}));
}

TEST(LenientRedistributeLocal, LeavesAnotherShapeToPyTorch) {
  EXPECT_FALSE(moved("torch.ones(4)", "spec(line, [Replicate()], 8)", "spec(line, [Shard(0)], 8)", true));
  EXPECT_FALSE(
      moved("torch.ones(4, 8)", "spec(line, [Shard(0)], 8, 8)", "spec(line, [Shard(1)], 8, 8)", true));
}

TEST(LenientRedistributeLocal, RefusesAnotherShapeThatPyTorchWouldCutWrongly) {
  EXPECT_TRUE(refuses<c10::ValueError>(
      [] {
        moved("torch.ones(4, 8)", "spec(line, [Shard(0)], 10, 8)", "spec(line, [Shard(1)], 10, 8)", true);
      },
      {"4, 8"}));
}

}  // namespace
}  // namespace funcol::python::redistribute_local_tensor_test
