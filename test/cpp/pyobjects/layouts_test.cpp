#include "pyobjects/layouts.h"

#include <gtest/gtest.h>

#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::layouts_test {
namespace {

using test::num_calls;
using test::python;
using test::refuses;

TEST(ToPlacement, ReadsEachKind) {
  EXPECT_EQ(to_placement(python("Replicate()")), Placement::replicate());
  EXPECT_EQ(to_placement(python("Shard(2)")), Placement::shard(2));
  EXPECT_EQ(to_placement(python("_StridedShard(1, split_factor=4)")), Placement::shard(1, 4));
  EXPECT_EQ(to_placement(python("Partial()")), Placement::partial(PartialOp::kSum));
  EXPECT_EQ(to_placement(python("Partial('max')")), Placement::partial(PartialOp::kMax));
}

TEST(ToPlacement, LeavesANegativeDim) { EXPECT_EQ(to_placement(python("Shard(-1)")), Placement::shard(-1)); }

TEST(ToPlacement, TellsMasksApart) {
  const auto one = python("_MaskPartial(offset_shape=torch.Size([8, 2]), offset_dim=0)");
  const auto other = python("_MaskPartial(offset_shape=torch.Size([8, 2]), offset_dim=0)");
  EXPECT_EQ(to_placement(one).op, PartialOp::kSum);
  EXPECT_NE(to_placement(one).mask, 0);
  EXPECT_EQ(to_placement(one), to_placement(one));
  EXPECT_NE(to_placement(one), to_placement(other));
}

TEST(ToPlacement, RefusesASubclassWithRulesOfItsOwn) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>([] { to_placement(python("OwnPartial()")); },
                                                {"OwnPartial", "rules of its own"}));
}

TEST(ToPlacement, RefusesAnUnknownReduction) {
  EXPECT_TRUE(
      refuses<c10::NotImplementedError>([] { to_placement(python("Partial('median')")); }, {"median"}));
}

TEST(ToPlacement, RefusesOtherObjects) {
  EXPECT_TRUE(refuses<c10::TypeError>([] { to_placement(python("3")); }, {"int", "Replicate()"}));
}

TEST(ToPlacements, ReadsListsTuplesAndText) {
  const std::vector<Placement> expected{Placement::shard(0), Placement::replicate()};
  EXPECT_EQ(to_placements(python("[Shard(0), Replicate()]")), expected);
  EXPECT_EQ(to_placements(python("(Shard(0), Replicate())")), expected);
  EXPECT_EQ(to_placements(python("'S0,R'")), expected);
  EXPECT_EQ(to_placements(python("()")), std::vector<Placement>());
}

TEST(ToPlacements, RefusesALoneOne) {
  EXPECT_TRUE(refuses<c10::TypeError>([] { to_placements(python("Shard(0)")); }, {"Shard", "list or tuple"}));
}

TEST(ToShardOrder, OfNoneIsTheDefault) { EXPECT_EQ(to_shard_order(python("None")), ShardOrder()); }

TEST(ToShardOrder, ReadsEntriesAndPairs) {
  const ShardOrder expected{{}, {1, 0}, {}, {2}};
  EXPECT_EQ(to_shard_order(python("(ShardOrderEntry(1, (1, 0)), ShardOrderEntry(3, (2,)))")), expected);
  EXPECT_EQ(to_shard_order(python("[(3, [2]), (1, [1, 0])]")), expected);
}

TEST(ToShardOrder, RefusesWhatIsNoEntry) {
  const auto read = [](const char* order) { return [order] { to_shard_order(python(order)); }; };
  EXPECT_TRUE(refuses<c10::ValueError>(read("[(0, [1], 2)]"), {"3 parts"}));
  EXPECT_TRUE(refuses<c10::ValueError>(read("[(-1, [0])]"), {"tensor dim -1"}));
  EXPECT_TRUE(refuses<c10::ValueError>(read("[(64, [0])]"), {"tensor dim 64", "at most 64"}));
  EXPECT_TRUE(refuses<c10::ValueError>(read("[(0, [0]), (0, [1])]"), {"tensor dim 0 twice"}));
  EXPECT_TRUE(refuses<c10::TypeError>(read("[(0.0, [0])]"), {"tensor dim", "float"}));
  EXPECT_TRUE(refuses<c10::TypeError>(read("[(0, ['dp'])]"), {"mesh dim", "str"}));
  EXPECT_TRUE(refuses<c10::TypeError>(read("{0: [0]}"), {"dict"}));
}

TEST(ToMesh, ReadsSizesAndNames) {
  const auto mesh = to_mesh(python("grid"));
  EXPECT_EQ(mesh, (Mesh{{2, 2}, {"dp", "tp"}, {}, 4}));
}

TEST(ToMesh, AsksPythonOnceAMesh) {
  const auto mesh = python("new_line()");
  to_mesh(mesh);
  const auto before = num_calls("mesh_axes");
  EXPECT_EQ(to_mesh(mesh).sizes, (std::vector<int64_t>{4}));
  EXPECT_EQ(num_calls("mesh_axes"), before);
}

TEST(ToMesh, ReadsAMeshAgainOnceItIsFlattened) {
  const auto mesh = python("new_grid()");
  EXPECT_EQ(to_mesh(mesh).merged, std::vector<AxisSet>());
  python("x._flatten('all')", mesh);
  EXPECT_EQ(to_mesh(mesh).merged, std::vector<AxisSet>{3});
}

TEST(ToMesh, RefusesOtherObjects) {
  EXPECT_TRUE(refuses<c10::TypeError>([] { to_mesh(python("[2, 2]")); }, {"list", "DeviceMesh"}));
}

}  // namespace
}  // namespace funcol::python::layouts_test
