#include "transfer/dtensors/distribute.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "support/python.h"

namespace funcol::python::distribute_test {
namespace {

using test::python;

// On rank 3 of 4.
py::object distributed(const char* tensor, const char* placements,
                       std::optional<int64_t> source = std::nullopt) {
  return distribute_tensor(python(tensor).cast<at::Tensor>(), python("line"), python(placements), source);
}

TEST(DistributeTensor, KeepsThisRanksPart) {
  const auto dtensor = distributed("torch.arange(10.0)", "[Shard(0)]");
  EXPECT_EQ(python("x._local_tensor.tolist()", dtensor).cast<std::vector<double>>(), std::vector<double>{9});
  EXPECT_TRUE(python("x._spec == spec(line, [Shard(0)], 10)", dtensor).cast<bool>());
}

TEST(DistributeTensor, HasTheSourcesSizes) {
  const auto dtensor = distributed("torch.ones(8, 6)", "[Shard(-1)]", /*source=*/0);
  EXPECT_TRUE(python("x._local_tensor.shape == (8, 0)", dtensor).cast<bool>());
  EXPECT_TRUE(python("x._spec == spec(line, [Shard(1)], 8, 6)", dtensor).cast<bool>());
}

TEST(DistributeTensor, ReplicatesByDefault) {
  const auto dtensor = distributed("torch.arange(3.0)", "None");
  EXPECT_TRUE(python("x.placements == (Replicate(),)", dtensor).cast<bool>());
  EXPECT_TRUE(python("x._local_tensor.tolist() == [0, 1, 2]", dtensor).cast<bool>());
}

TEST(DistributeTensor, KeepsWhetherAGradientIsNeeded) {
  const auto dtensor = distributed("torch.ones(8, requires_grad=True)", "[Shard(0)]");
  EXPECT_TRUE(
      python("x.requires_grad and x.is_leaf and x._local_tensor.requires_grad", dtensor).cast<bool>());
  EXPECT_FALSE(python("x.requires_grad", distributed("torch.ones(8)", "[Shard(0)]")).cast<bool>());
}

TEST(DistributeTensor, LeavesTheRestToPyTorch) {
  EXPECT_FALSE(distributed("torch.ones(8)", "[OwnPartial()]")) << "a placement with rules of its own";
  EXPECT_FALSE(distributed("torch.ones(8)", "[Shard(0), Shard(0)]")) << "another number of axes";
  EXPECT_FALSE(distributed("torch.ones(8).to_sparse()", "[Shard(0)]")) << "no strides";
}

}  // namespace
}  // namespace funcol::python::distribute_test
