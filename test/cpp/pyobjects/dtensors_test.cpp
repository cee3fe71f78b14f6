#include "pyobjects/dtensors.h"

#include <gtest/gtest.h>

#include "pyobjects/attributes.h"
#include "support/python.h"

namespace funcol::python::dtensors_test {
namespace {

using test::python;

std::optional<std::vector<Placement>> known(const char* placements, size_t num_axes = 2) {
  return known_placements(python(placements), num_axes, /*num_dims=*/3);
}

TEST(MakeDTensor, HoldsTheLocalTensorAndTheSpec) {
  const auto local = python("torch.ones(2, 3)");
  const auto spec = python("spec(line, [Shard(0)], 8, 3)");
  const auto dtensor = make_dtensor(local.ptr(), spec, /*requires_grad=*/true);
  EXPECT_TRUE(attribute<"_local_tensor">(dtensor).is(local));
  EXPECT_TRUE(attribute<"_spec">(dtensor).is(spec));
  EXPECT_TRUE(python("x.shape == (8, 3) and x.requires_grad", dtensor).cast<bool>());
}

TEST(MakeDTensor, NeedsNoGradientUnlessAsked) {
  const auto local = python("torch.ones(2, 3)");
  const auto dtensor = make_dtensor(local.ptr(), python("spec(line, [Shard(0)], 8, 3)"));
  EXPECT_FALSE(python("x.requires_grad", dtensor).cast<bool>());
}

TEST(KnownPlacements, CountDimsFromZero) {
  EXPECT_EQ(known("[Shard(-1), Shard(1)]"), (std::vector{Placement::shard(2), Placement::shard(1)}));
  EXPECT_EQ(known("(Replicate(), Partial())"), (std::vector{Placement::replicate(), Placement::partial()}));
}

TEST(KnownPlacements, AreNothingForTheRest) {
  EXPECT_FALSE(known("[Shard(0)]").has_value()) << "another length";
  EXPECT_FALSE(known("[Shard(0), OwnPartial()]").has_value()) << "an unknown kind";
  EXPECT_FALSE(known("[Partial('sum'), Partial('max')]").has_value()) << "mixed partials";
  EXPECT_FALSE(known("[Shard(0), _MaskPartial(offset_shape=torch.Size([8]), offset_dim=0)]").has_value())
      << "a mask";
  EXPECT_FALSE(known("{Shard(0), Shard(1)}").has_value()) << "no sequence";
}

TEST(NewSpec, EqualsTheSpecOfPyTorch) {
  const auto spec = new_spec(python("grid"), {Placement::shard(1), Placement::partial()},
                             {{5, 3}, {3, 1}, Dtype::kFloat32});
  EXPECT_TRUE(spec.equal(python("spec(grid, [Shard(1), Partial()], 5, 3)")));
}

TEST(ObservesRedistribution, InsideAContext) {
  const auto context =
      python("__import__('torch.distributed.tensor._utils', fromlist=['x']).ExplicitRedistributionContext()");
  EXPECT_FALSE(observes_redistribution());
  context.attr("__enter__")();
  EXPECT_TRUE(observes_redistribution());
  context.attr("__exit__")(py::none(), py::none(), py::none());
  EXPECT_FALSE(observes_redistribution());
}

}  // namespace
}  // namespace funcol::python::dtensors_test
