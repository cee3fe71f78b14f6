#include "planner/common_mesh.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "planner/mesh_changes.h"

namespace funcol::common_mesh_test {
namespace {

using test::ranked;
using ::testing::Values;

struct Views {
  std::vector<int64_t> src;
  std::vector<int64_t> dst;
  std::vector<int64_t> common;
  std::vector<AxisSet> src_axes;
  std::vector<AxisSet> dst_axes;
  std::vector<AxisSet> merged;
};

class CommonMeshOf : public ::testing::TestWithParam<Views> {};

TEST_P(CommonMeshOf, HasTheAxesAndGroupsOfBothViews) {
  const auto& views = GetParam();
  const auto common = common_mesh(ranked(views.src), ranked(views.dst));
  ASSERT_TRUE(common.has_value());
  EXPECT_EQ(common->mesh.sizes, views.common);
  EXPECT_EQ(common->src_axes, views.src_axes);
  EXPECT_EQ(common->dst_axes, views.dst_axes);
  EXPECT_EQ(common->mesh.merged, views.merged);
}

INSTANTIATE_TEST_SUITE_P(Meshes, CommonMeshOf,
                         Values(Views{{4, 2}, {8}, {4, 2}, {1, 2}, {3}, {3}},
                                Views{{8}, {4, 2}, {4, 2}, {3}, {1, 2}, {3}},
                                Views{{2, 3}, {2, 3}, {2, 3}, {1, 2}, {1, 2}, {}},
                                Views{{2, 4}, {2, 2, 2}, {2, 2, 2}, {1, 6}, {1, 2, 4}, {6}},
                                Views{{1, 6, 1}, {3, 1, 2}, {3, 2}, {0, 3, 0}, {1, 0, 2}, {3}},
                                Views{{4, 6}, {4, 3, 2}, {4, 3, 2}, {1, 6}, {1, 2, 4}, {6}},
                                Views{{1}, {1, 1}, {}, {0}, {0, 0}, {}}));

TEST(CommonMesh, IsNoneWhereAnAxisWouldHaveNoGroup) {
  EXPECT_FALSE(common_mesh(ranked({4, 2}), ranked({2, 4})).has_value());
}

TEST(CommonMesh, IsNoneWhereSizesDoNotDivide) {
  EXPECT_FALSE(common_mesh(ranked({3, 2}), ranked({2, 3})).has_value());
}

TEST(CommonMesh, IsNoneForOtherRanksAndOrders) {
  EXPECT_FALSE(common_mesh(ranked({4}), ranked({4}, 1)).has_value());
  EXPECT_FALSE(common_mesh(ranked({4}), ranked({2})).has_value());
  auto turned = ranked({2, 2});
  turned.ranks = {0, 2, 1, 3};
  EXPECT_FALSE(common_mesh(ranked({4}), turned).has_value());
}

TEST(CommonMesh, TakesNamesAndMergedGroupsFromItsViews) {
  auto src = ranked({2, 4});
  src.mesh.names = {"dp", "tp"};
  src.mesh.merged = {0b11};
  const auto common = common_mesh(src, ranked({2, 2, 2}));
  EXPECT_EQ(common->mesh.names, (std::vector<std::string>{"dp", "1", "2"}));
  EXPECT_EQ(common->mesh.merged, (std::vector<AxisSet>{0b110, 0b111}));
}

std::optional<Layout> on_common(const std::vector<int64_t>& view, const test::Sides& sides,
                                const std::vector<int64_t>& other, int64_t size) {
  const auto common = common_mesh(ranked(view), ranked(other));
  const Mesh mesh{view, {}, {}};
  return layout_on_common(common->mesh, common->src_axes, mesh, test::layout_of(sides, mesh, 1), {size});
}

TEST(LayoutOnCommon, CutsByAllPartsOfAnAxis) {
  EXPECT_EQ(to_string(*on_common({8}, {"S0"}, {4, 2}, 16)), "S(0)[0]S(0)[1]");
  EXPECT_EQ(to_string(*on_common({2, 4}, {"S0,S0", {{1, 0}}}, {2, 2, 2}, 16)), "S(0)[2]S(0)[0]S(0)[1]");
  EXPECT_EQ(to_string(*on_common({8}, {"P(max)"}, {4, 2}, 5)), "P(max)P(max)");
}

TEST(LayoutOnCommon, IsNoneWhereUnevenShardsDiffer) {
  EXPECT_FALSE(on_common({4}, {"S0"}, {2, 2}, 5).has_value());
  EXPECT_TRUE(on_common({4}, {"S0"}, {2, 2}, 3).has_value());
  EXPECT_TRUE(on_common({4, 2}, {"S0,R"}, {8}, 5).has_value());
}

}  // namespace
}  // namespace funcol::common_mesh_test
