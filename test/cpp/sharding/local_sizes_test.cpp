#include "sharding/local_sizes.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "support/python.h"

namespace funcol::python::local_sizes_test {
namespace {

using test::python;
using Ints = std::vector<int64_t>;

Ints local_shape(const char* spec, const Ints& shape) {
  return local_shape_of(python(spec), shape).cast<Ints>();
}

TEST(LocalShapeOf, GivesTheLastRankWhatIsLeft) {
  EXPECT_EQ(local_shape("spec(line, [Shard(0)], 10, 3)", {10, 3}), (Ints{1, 3}));
  EXPECT_EQ(local_shape("spec(line, [Shard(0)], 9, 3)", {9, 3}), (Ints{0, 3}));
  EXPECT_EQ(local_shape("spec(line, [Shard(1)], 10, 8)", {10, 8}), (Ints{10, 2}));
}

TEST(LocalShapeOf, FollowsTheShardOrder) {
  // Rank (1, 1) of 5 rows. dp first: of {3 4} the second half; tp first: of {3 4} too, but of 7 it differs.
  EXPECT_EQ(local_shape("spec(grid, [Shard(0), Shard(0)], 7)", {7}), Ints{1});
  EXPECT_EQ(local_shape("spec(grid, [Shard(0), Shard(0)], 5, order=[(0, (1, 0))])", {5}), Ints{1});
}

TEST(LocalShapeOf, CutsNothingForPartials) {
  EXPECT_EQ(local_shape("spec(grid, [Partial(), Shard(0)], 8)", {8}), Ints{4});
  EXPECT_EQ(local_shape("spec(line, [OwnPartial()], 8)", {8}), Ints{8});
}

TEST(LocalShapeOf, IsOfTheShapeThatIsAskedFor) {
  EXPECT_EQ(local_shape("spec(line, [Shard(1)], 10, 3)", {2, 8, 5}), (Ints{2, 2, 5}));
}

TEST(UnevenAxes, AreThoseWhoseRanksHoldDifferentSizes) {
  const auto uneven = [](const char* spec, const Ints& shape) { return uneven_axes(python(spec), shape); };
  EXPECT_EQ(uneven("spec(grid, [Shard(0), Shard(1)], 8, 4)", {8, 4}), std::set<int64_t>());
  EXPECT_EQ(uneven("spec(grid, [Shard(0), Shard(1)], 8, 5)", {8, 5}), std::set<int64_t>{1});
  EXPECT_EQ(uneven("spec(grid, [Shard(0), Shard(0)], 6)", {6}), (std::set<int64_t>{0, 1}));
}

TEST(LocalSizePlaces, NamesArgumentsByTheirPosition) {
  const auto view = local_size_places(python("aten.view.default"));
  ASSERT_TRUE(view.has_value());
  EXPECT_EQ(view->shape, 1);
  EXPECT_EQ(view->stride, std::nullopt);
  const auto strided = local_size_places(python("aten.new_empty_strided.default"));
  ASSERT_TRUE(strided.has_value());
  EXPECT_EQ(strided->shape, 1);
  EXPECT_EQ(strided->stride, 2);
  const auto norm = local_size_places(python("aten.native_group_norm.default"));
  ASSERT_TRUE(norm.has_value());
  EXPECT_EQ(norm->batch_channels_pixels, (std::vector<size_t>{3, 4, 5}));
}

TEST(LocalSizePlaces, AreNoneWhereThereIsNoSize) {
  EXPECT_FALSE(local_size_places(python("aten.add.Tensor")).has_value());
  EXPECT_FALSE(local_size_places(python("aten.view_copy.dtype")).has_value());
}

}  // namespace
}  // namespace funcol::python::local_sizes_test
