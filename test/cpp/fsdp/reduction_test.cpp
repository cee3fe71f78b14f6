#include <gtest/gtest.h>

#include "fsdp/groups.h"
#include "fsdp/known_fully_shard.h"

namespace funcol::python::reduction_test {
namespace {

// Groups whose backward pass is over, with ones as the gradient. The `fake` backend sends nothing.
class Reductions : public test::FullyShard {
 protected:
  void SetUp() override {
    FullyShard::SetUp();
    if (IsSkipped()) {
      return;
    }
    fsdp_pre_forward(group);
    fsdp_post_forward(group);
    fsdp_pre_backward(group, py::bool_(false));
    test::python("x.module.weight.__setattr__('grad', torch.ones(8, 2))", layer);
  }
};

TEST_F(Reductions, GiveShardedParametersTheirGradients) {
  ASSERT_TRUE(fsdp_post_backward(group));
  EXPECT_TRUE(holds("x.trained() == 'POST_BACKWARD' and x.sharded() == 'SHARDED'"));
  EXPECT_TRUE(holds("type(x.module.weight.grad) is DTensor and x.module.weight.grad.shape == (8, 2)"));
  EXPECT_TRUE(holds("x.module.weight.grad._local_tensor.shape == (2, 2)"));
}

TEST_F(Reductions, TakeTheWholeGradients) {
  const py::object unsharded = layer.attr("module").attr("weight");
  ASSERT_TRUE(fsdp_post_backward(group));
  EXPECT_TRUE(unsharded.attr("grad").is_none());
}

TEST_F(Reductions, SendThePaddedGradients) {
  ASSERT_TRUE(fsdp_post_backward(group));
  EXPECT_TRUE(holds("len(x.group.comm_ctx.reduce_scatter_states) == 1"));
  EXPECT_TRUE(holds("x.group.comm_ctx.reduce_scatter_states[0].reduce_scatter_input.numel() == 16"));
}

TEST_F(Reductions, AddToAGradientThatIsThere) {
  ASSERT_TRUE(fsdp_post_backward(group));
  const py::object sum = layer.attr("module").attr("weight").attr("grad");
  fsdp_pre_forward(group);
  fsdp_post_forward(group);
  fsdp_pre_backward(group, py::bool_(false));
  test::python("x.module.weight.__setattr__('grad', torch.ones(8, 2))", layer);
  ASSERT_TRUE(fsdp_post_backward(group));
  EXPECT_TRUE(sum.is(py::object(layer.attr("module").attr("weight").attr("grad"))));
}

TEST_F(Reductions, OfNoGradientSendNothing) {
  test::python("x.module.weight.__setattr__('grad', None)", layer);
  ASSERT_TRUE(fsdp_post_backward(group));
  EXPECT_TRUE(holds("x.module.weight.grad is None and x.sharded() == 'SHARDED'"));
  EXPECT_TRUE(holds("len(x.group.comm_ctx.reduce_scatter_states) == 0"));
}

TEST_F(Reductions, WithHooksAreLeftToPyTorch) {
  group.attr("_all_reduce_hook") = test::python("print");
  EXPECT_FALSE(fsdp_post_backward(group));
  EXPECT_TRUE(holds("x.trained() == 'PRE_BACKWARD' and x.module.weight.grad is not None"));
}

}  // namespace
}  // namespace funcol::python::reduction_test
