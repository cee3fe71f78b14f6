#include "fsdp/groups.h"

#include <gtest/gtest.h>

#include "fsdp/known_fully_shard.h"

namespace funcol::python::groups_test {
namespace {

using Groups = test::FullyShard;

TEST_F(Groups, GatherTheirShards) {
  ASSERT_TRUE(fsdp_unshard(group, py::bool_(false)));
  EXPECT_TRUE(holds("x.group._all_gather_result.all_gather_output.numel() == 16"));
  EXPECT_TRUE(
      holds("torch.equal(x.group._all_gather_result.all_gather_output[12:], "
            "x.module.weight._local_tensor.flatten())"))
      << "the part of this rank, the last";
  EXPECT_TRUE(holds("x.sharded() == 'SHARDED'"));
}

TEST_F(Groups, AreUnshardedAfterTheWait) {
  ASSERT_TRUE(fsdp_unshard(group, py::bool_(false)));
  ASSERT_TRUE(fsdp_wait_for_unshard(group));
  EXPECT_TRUE(holds("x.sharded() == 'UNSHARDED' and x.group._all_gather_result is None"));
  EXPECT_TRUE(holds("type(x.module.weight) is torch.nn.Parameter and x.module.weight.shape == (8, 2)"));
  EXPECT_TRUE(holds("x.module.weight.requires_grad"));
}

TEST_F(Groups, GatherOnce) {
  ASSERT_TRUE(fsdp_unshard(group, py::bool_(false)));
  const py::object result = group.attr("_all_gather_result");
  ASSERT_TRUE(fsdp_unshard(group, py::bool_(false)));
  EXPECT_TRUE(result.is(py::object(group.attr("_all_gather_result"))));
}

TEST_F(Groups, RunForward) {
  EXPECT_TRUE(fsdp_pre_forward(group).is(py::bool_(true))) << "the pass begins";
  EXPECT_TRUE(holds("x.trained() == 'FORWARD' and x.sharded() == 'UNSHARDED'"));
  EXPECT_TRUE(fsdp_pre_forward(group).is(py::bool_(false))) << "the pass has begun";
  ASSERT_TRUE(fsdp_post_forward(group));
  EXPECT_TRUE(holds("x.trained() == 'IDLE' and x.group.comm_ctx.post_forward_order == [x.group]"));
  EXPECT_TRUE(holds("x.group._post_forward_indices == [0]"));
}

TEST_F(Groups, ReshardAfterForward) {
  group.attr("post_forward_mesh_info") = group.attr("mesh_info");
  fsdp_pre_forward(group);
  ASSERT_TRUE(fsdp_post_forward(group));
  EXPECT_TRUE(holds("x.sharded() == 'SHARDED' and type(x.module.weight.data) is DTensor"));
}

TEST_F(Groups, GatherAgainForBackward) {
  group.attr("post_forward_mesh_info") = group.attr("mesh_info");
  fsdp_pre_forward(group);
  fsdp_post_forward(group);
  ASSERT_TRUE(fsdp_pre_backward(group, py::bool_(false)));
  EXPECT_TRUE(holds("x.trained() == 'PRE_BACKWARD' and x.sharded() == 'UNSHARDED'"));
}

TEST_F(Groups, PrefetchTheOneBefore) {
  const auto other = test::python("GroupOfALayer()");
  other.attr("group").attr("comm_ctx") = group.attr("comm_ctx");
  for (const auto& one : {other.attr("group"), layer.attr("group")}) {
    one.attr("post_forward_mesh_info") = one.attr("mesh_info");
    fsdp_pre_forward(one);
    fsdp_post_forward(one);
  }
  ASSERT_TRUE(fsdp_pre_backward(group, py::bool_(true)));
  EXPECT_FALSE(other.attr("group").attr("_all_gather_result").is_none());
  EXPECT_TRUE(test::python("x.trained() == 'IDLE'", other).cast<bool>());
}

TEST_F(Groups, OfOtherClassesAreLeftToPyTorch) {
  const auto other = test::python("SimpleNamespace()");
  EXPECT_FALSE(fsdp_pre_forward(other));
  EXPECT_FALSE(fsdp_post_forward(other));
  EXPECT_FALSE(fsdp_pre_backward(other, py::bool_(false)));
  EXPECT_FALSE(fsdp_unshard(other, py::bool_(false)));
  EXPECT_FALSE(fsdp_wait_for_unshard(other));
}

}  // namespace
}  // namespace funcol::python::groups_test
