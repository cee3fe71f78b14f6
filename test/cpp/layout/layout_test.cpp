#include "layout/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "layout/naive_shards.h"
#include "layout/shards.h"
#include "support/refuses.h"

namespace funcol::layout_test {
namespace {

using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

Mesh mesh_of(std::vector<int64_t> sizes) { return {std::move(sizes), {}, {}}; }

struct Ordered {
  std::string placements;
  ShardOrder order;
  std::string text;
};

void PrintTo(const Ordered& ordered, std::ostream* out) { *out << ordered.text; }

class DefaultOrder : public ::testing::TestWithParam<Ordered> {};

TEST_P(DefaultOrder, GoesFromTheFirstAxisToTheLast) {
  EXPECT_EQ(default_shard_order(parse_placements(GetParam().placements)), GetParam().order);
}

TEST_P(DefaultOrder, IsTheOneOfALayoutWithoutAnOrder) {
  const auto placements = parse_placements(GetParam().placements);
  const Mesh mesh = mesh_of(std::vector<int64_t>(placements.size(), 2));
  EXPECT_EQ(make_layout("test", placements, {}, mesh, 4).order, GetParam().order);
}

TEST_P(DefaultOrder, IsPrintedWhereAxesShareADim) {
  const auto placements = parse_placements(GetParam().placements);
  EXPECT_EQ(to_string(Layout{placements, default_shard_order(placements)}), GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(Layouts, DefaultOrder,
                         Values(Ordered{"R", {}, "R"}, Ordered{"R,P", {}, "RP(sum)"},
                                Ordered{"S0", {{0}}, "S(0)"}, Ordered{"S2", {{}, {}, {0}}, "S(2)"},
                                Ordered{"S0,R", {{0}}, "S(0)R"}, Ordered{"S1,S0", {{1}, {0}}, "S(1)S(0)"},
                                Ordered{"S0,S0", {{0, 1}}, "S(0)[0]S(0)[1]"},
                                Ordered{"S1,P(max),S1", {{}, {0, 2}}, "S(1)[0]P(max)S(1)[1]"},
                                Ordered{"_S(0,2),S0", {{0, 1}}, "_S(0, 2)[0]S(0)[1]"},
                                Ordered{"S0,S3,S0", {{0, 2}, {}, {}, {1}}, "S(0)[0]S(3)S(0)[1]"}));

TEST(Mesh, CountsPlacesAlongTheLastAxisFirst) {
  const Mesh mesh{{2, 3}, {}, {}};
  EXPECT_EQ(mesh.place({1, 0}), 3);
  for (int64_t place = 0; place < 6; ++place) {
    EXPECT_EQ(mesh.place(mesh.coordinate(place)), place);
  }
}

TEST(Mesh, HasAGroupOfEachAxisAndOfMergedAxes) {
  const Mesh mesh{{2, 3, 4}, {}, {0b011}};
  EXPECT_TRUE(mesh.has_group(0b100));
  EXPECT_TRUE(mesh.has_group(0b011));
  EXPECT_FALSE(mesh.has_group(0b110));
}

TEST(Layout, WithItsOwnOrderIsPrintedWithIt) {
  const Layout layout{parse_placements("S1,S1,P"), {{}, {1, 0}}};
  EXPECT_EQ(to_string(layout), "S(1)[1]S(1)[0]P(sum)");
}

TEST(Layout, KnowsTheAxesOfADimFirstCutFirst) {
  const Layout layout{parse_placements("S1,S1,S1"), {{}, {2, 0, 1}}};
  EXPECT_EQ(layout.axes_of(1), (std::vector<int64_t>{2, 0, 1}));
}

TEST(Layout, KnowsThatADimBehindTheLastShardedOneHasNoAxes) {
  const Layout layout{parse_placements("S0"), {{0}}};
  EXPECT_TRUE(layout.axes_of(3).empty());
}

TEST(MakeLayout, CountsDimsFromZero) {
  const Layout layout = make_layout("test", parse_placements("S-1,S-3"), {}, mesh_of({2, 2}), 3);
  EXPECT_EQ(layout, (Layout{parse_placements("S2,S0"), {{1}, {}, {0}}}));
}

TEST(MakeLayout, DropsDimsThatNoAxisCutsFromTheEndOfTheOrder) {
  const Layout layout = make_layout("test", parse_placements("R,S0"), {{1}, {}, {}}, mesh_of({2, 2}), 3);
  EXPECT_EQ(layout.order, (ShardOrder{{1}}));
}

TEST(MakeLayout, TakesAnyOrderOfTheAxesOfADim) {
  const Layout layout = make_layout("test", parse_placements("S0,S0"), {{1, 0}}, mesh_of({2, 2}), 1);
  EXPECT_EQ(layout.order, (ShardOrder{{1, 0}}));
}

TEST(MakeLayout, TakesPartialsThatDoNotCommuteWhereAnAxisHoldsOneRank) {
  EXPECT_NO_THROW(make_layout("test", parse_placements("P(max),P(sum)"), {}, mesh_of({1, 2}), 1));
}

TEST(MakeLayout, TakesSumsAndAveragesTogether) {
  EXPECT_NO_THROW(make_layout("test", parse_placements("P(avg),P(sum)"), {}, mesh_of({2, 2}), 1));
}

struct Refused {
  std::string name;
  std::vector<Placement> placements;
  ShardOrder order;
  int64_t num_dims;
  std::vector<std::string> parts;  // of the message
};

void PrintTo(const Refused& refused, std::ostream* out) { *out << refused.name; }

class RefusedLayout : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedLayout, SaysWhatCameAndWhatToDo) {
  const Refused& refused = GetParam();
  EXPECT_TRUE(test::refuses(
      [&refused] {
        make_layout("an_op", refused.placements, refused.order, mesh_of({2, 3}), refused.num_dims);
      },
      refused.parts));
}

INSTANTIATE_TEST_SUITE_P(
    Mistakes, RefusedLayout,
    Values(Refused{"TooFewPlacements",
                   parse_placements("S0"),
                   {},
                   2,
                   {"an_op: ", "1 placements (S(0))", "a mesh of 2 axes", "one placement for each axis"}},
           Refused{"TooManyPlacements",
                   parse_placements("R,R,S(1)"),
                   {},
                   2,
                   {"an_op: ", "3 placements (R, R, S(1))", "a mesh of 2 axes"}},
           Refused{"DimTooHigh",
                   parse_placements("R,S2"),
                   {},
                   2,
                   {"an_op: ", "S(2) shards a dim", "a tensor of 2 dims", "from -2 to 1"}},
           Refused{"DimTooLow",
                   parse_placements("S-3,R"),
                   {},
                   2,
                   {"an_op: ", "S(-3) shards a dim", "a tensor of 2 dims", "from -2 to 1"}},
           Refused{"StridedDimTooHigh",
                   parse_placements("_S(4,2),R"),
                   {},
                   4,
                   {"an_op: ", "_S(4, 2) shards a dim", "from -4 to 3"}},
           Refused{
               "ScalarSharded", parse_placements("S0,R"), {}, 0, {"an_op: ", "S(0)", "a tensor of 0 dims"}},
           Refused{"SplitFactorZero",
                   {Placement::shard(0, 0), Placement::replicate()},
                   {},
                   2,
                   {"an_op: ", "_S(0, 0)", "split factor below 1"}},
           Refused{"SplitFactorNegative",
                   {Placement::replicate(), Placement::shard(1, -2)},
                   {},
                   2,
                   {"an_op: ", "_S(1, -2)", "split factor below 1"}},
           Refused{"SplitFactorBeyondAllRanks",
                   {Placement::shard(0, std::numeric_limits<int64_t>::max()), Placement::replicate()},
                   {},
                   2,
                   {"an_op: ", "_S(0, 9223372036854775807)", "above 2^31"}},
           Refused{"SumAndMax",
                   parse_placements("P(sum),P(max)"),
                   {},
                   2,
                   {"an_op: ", "(P(sum), P(max))", "mix reductions", "Reduce one of them"}},
           Refused{
               "MinAndMax", parse_placements("P(min),P(max)"), {}, 2, {"(P(min), P(max))", "mix reductions"}},
           Refused{"OrderUnderAnotherDim",
                   parse_placements("S0,R"),
                   {{}, {0}},
                   2,
                   {"an_op: ", "axis 0 cuts dim 1", "(S(0), R)", "List each axis"}},
           Refused{"OrderOfAReplicatedAxis",
                   parse_placements("S0,R"),
                   {{0, 1}},
                   2,
                   {"an_op: ", "axis 1 cuts dim 0", "(S(0), R)"}},
           Refused{"OrderTwiceTheSameAxis",
                   parse_placements("S0,S0"),
                   {{0, 0}},
                   2,
                   {"an_op: ", "axis 0 cuts dim 0", "(S(0), S(0))", "once"}},
           Refused{"OrderOfAnAxisThatIsNot",
                   parse_placements("S0,S0"),
                   {{0, 2}},
                   2,
                   {"an_op: ", "axis 2 cuts dim 0"}},
           Refused{"OrderOfANegativeAxis",
                   parse_placements("S0,S0"),
                   {{0, -1}},
                   2,
                   {"an_op: ", "axis -1 cuts dim 0"}},
           Refused{"OrderWithoutAnAxis",
                   parse_placements("S0,S0"),
                   {{1}},
                   2,
                   {"an_op: ", "lists 1 axes", "2 of the placements (S(0), S(0))", "leave the order out"}},
           Refused{"OrderOfNothing", parse_placements("S0,S0"), {{}}, 2, {"an_op: ", "lists 0 axes"}}),
    [](const auto& param) { return param.param.name; });

// Every order in which two or more axes of a mesh may cut one dim.
std::vector<std::vector<int64_t>> all_orders(int64_t num_axes) {
  std::vector<std::vector<int64_t>> orders;
  for (AxisSet set = 1; set < (AxisSet{1} << num_axes); ++set) {
    std::vector<int64_t> order;
    for (int64_t axis = 0; axis < num_axes; ++axis) {
      if (contains(set, axis)) {
        order.push_back(axis);
      }
    }
    do {
      orders.push_back(order);
    } while (order.size() > 1 && std::ranges::next_permutation(order).found);
  }
  return orders;
}

// The order as PyTorch writes it without one: an axis that stands before others but cuts after them is
// strided by the product of their sizes (DTensorSpec._convert_shard_order_to_StridedShard).
Layout as_strided_shards(const Mesh& mesh, const std::vector<int64_t>& order) {
  Layout layout{std::vector<Placement>(mesh.sizes.size()), {order}};
  for (size_t place = 0; place < order.size(); ++place) {
    int64_t split_factor = 1;
    for (size_t before = 0; before < place; ++before) {
      split_factor *= order[before] > order[place] ? mesh.sizes[order[before]] : 1;
    }
    layout.placements[order[place]] = Placement::shard(0, split_factor);
  }
  std::sort(layout.order[0].begin(), layout.order[0].end());
  return layout;
}

struct MeshAndOrder {
  std::vector<int64_t> mesh;
  std::vector<int64_t> order;
};

std::vector<MeshAndOrder> meshes_with_all_orders() {
  std::vector<MeshAndOrder> all;
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{2},
                                           {2, 2},
                                           {3, 2},
                                           {2, 4},
                                           {1, 3},
                                           {2, 2, 2},
                                           {2, 3, 2},
                                           {4, 3, 2},
                                           {2, 1, 3}}) {
    for (const auto& order : all_orders(static_cast<int64_t>(mesh.size()))) {
      all.push_back({mesh, order});
    }
  }
  return all;
}

using StridedCase = std::tuple<MeshAndOrder, int64_t>;  // and the size of the dim

std::string name_of_strided(const ::testing::TestParamInfo<StridedCase>& param) {
  const auto& [order, size] = param.param;
  return test::joined(order.mesh) + "_order_" + test::joined(order.order, "_") + "_size_" +
         std::to_string(size);
}

bool has_strided_shards(const Layout& layout) {
  return std::ranges::any_of(layout.placements,
                             [](const auto& placement) { return placement.split_factor != 1; });
}

class OrderWrittenAsStridedShards : public ::testing::TestWithParam<StridedCase> {
 protected:
  const int64_t size_ = std::get<1>(GetParam());
  const Mesh mesh_ = mesh_of(std::get<0>(GetParam()).mesh);
  const std::vector<int64_t> order_ = std::get<0>(GetParam()).order;
  const Layout strided_ = as_strided_shards(mesh_, order_);
  const Layout result_ = without_strided_shards(strided_, mesh_, {size_});
};

TEST_P(OrderWrittenAsStridedShards, IsTheSameForEveryRankWithoutThem) {
  for (const auto& coordinate : test::coordinates(mesh_)) {
    EXPECT_EQ(test::listed(local_indices(result_, mesh_, 0, size_, coordinate)),
              test::naive_local_indices(strided_, mesh_, 0, size_, coordinate))
        << to_string(result_) << ", rank " << test::joined(coordinate);
  }
}

TEST_P(OrderWrittenAsStridedShards, IsKeptOrBecomesThatOrder) {
  Layout plain = strided_;
  plain.order = {order_};
  for (auto& placement : plain.placements) {
    placement.split_factor = 1;
  }
  bool same_for_all = true;
  for (const auto& coordinate : test::coordinates(mesh_)) {
    same_for_all = same_for_all && test::naive_local_indices(plain, mesh_, 0, size_, coordinate) ==
                                       test::naive_local_indices(strided_, mesh_, 0, size_, coordinate);
  }
  EXPECT_EQ(has_strided_shards(result_), has_strided_shards(strided_) && !same_for_all) << to_string(result_);
}

TEST_P(OrderWrittenAsStridedShards, IsAnOrderThatMakeLayoutTakes) {
  EXPECT_EQ(make_layout("test", result_.placements, result_.order, mesh_, 1), result_);
}

INSTANTIATE_TEST_SUITE_P(AllOrders, OrderWrittenAsStridedShards,
                         Combine(ValuesIn(meshes_with_all_orders()),
                                 Values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 23, 24, 25, 48)),
                         name_of_strided);

using SplitFactors = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>;  // mesh, factors, size

class AnySplitFactors : public ::testing::TestWithParam<SplitFactors> {};

TEST_P(AnySplitFactors, LeaveEveryRankWhatItHeld) {
  const auto& [sizes, factors, size] = GetParam();
  const Mesh mesh = mesh_of(sizes);
  std::vector<Placement> placements(sizes.size());
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    placements[axis] = Placement::shard(0, factors[axis]);
  }
  const Layout strided = make_layout("test", placements, {}, mesh, 1);
  const Layout result = without_strided_shards(strided, mesh, {size});
  for (const auto& coordinate : test::coordinates(mesh)) {
    EXPECT_EQ(test::listed(local_indices(result, mesh, 0, size, coordinate)),
              test::naive_local_indices(strided, mesh, 0, size, coordinate))
        << to_string(strided) << " as " << to_string(result) << ", rank " << test::joined(coordinate);
  }
}

std::vector<std::vector<int64_t>> all_split_factors() {
  std::vector<std::vector<int64_t>> all;
  for (const int64_t first : {1, 2, 3, 4, 6}) {
    for (const int64_t second : {1, 2, 3, 4}) {
      for (const int64_t third : {1, 2, 3}) {
        all.push_back({first, second, third});
      }
    }
  }
  return all;
}

std::string name_of_factors(const ::testing::TestParamInfo<SplitFactors>& param) {
  const auto& [mesh, factors, size] = param.param;
  return test::joined(mesh) + "_split_" + test::joined(factors, "_") + "_size_" + std::to_string(size);
}

INSTANTIATE_TEST_SUITE_P(Meshes, AnySplitFactors,
                         Combine(Values(std::vector<int64_t>{2, 2, 2}, std::vector<int64_t>{3, 2, 2},
                                        std::vector<int64_t>{2, 1, 3}),
                                 ValuesIn(all_split_factors()), Values(1, 5, 11, 12, 13, 24)),
                         name_of_factors);

struct Undecodable {
  std::vector<int64_t> mesh;
  std::string placements;
  ShardOrder order;
};

void PrintTo(const Undecodable& layout, std::ostream* out) {
  *out << layout.placements << " on " << test::joined(layout.mesh);
}

class StridedShardsThatNoOrderDescribes : public ::testing::TestWithParam<Undecodable> {};

TEST_P(StridedShardsThatNoOrderDescribes, AreKept) {
  const Mesh mesh = mesh_of(GetParam().mesh);
  const Layout layout =
      make_layout("test", parse_placements(GetParam().placements), GetParam().order, mesh, 2);
  EXPECT_EQ(without_strided_shards(layout, mesh, {24, 24}), layout);
}

INSTANTIATE_TEST_SUITE_P(Layouts, StridedShardsThatNoOrderDescribes,
                         Values(Undecodable{{2}, "_S(0,2)", {}}, Undecodable{{2, 2}, "S0,_S(0,2)", {}},
                                Undecodable{{2, 2}, "_S(0,3),S0", {}}, Undecodable{{2, 2}, "_S(0,2),S1", {}},
                                Undecodable{{2, 3}, "_S(0,2),S0", {}}, Undecodable{{2, 2}, "R,_S(1,2)", {}},
                                Undecodable{{2, 2, 2}, "_S(0,2),_S(0,4),S0", {}},
                                Undecodable{{2, 2}, "_S(0,2),S0", {{1, 0}}}));

TEST(StridedShards, OfFsdpWithTensorParallelismBecomeTheOrderOfTheirAxes) {
  const Mesh mesh = mesh_of({2, 2});
  const Layout layout = make_layout("test", parse_placements("_S(0,2),S0"), {}, mesh, 2);
  EXPECT_EQ(without_strided_shards(layout, mesh, {8, 3}), (Layout{parse_placements("S0,S0"), {{1, 0}}}));
}

TEST(StridedShards, AreRewrittenInOneDimAndKeptInAnother) {
  const Mesh mesh = mesh_of({2, 2, 2});
  const Layout layout = make_layout("test", parse_placements("_S(1,2),S1,_S(0,2)"), {}, mesh, 2);
  EXPECT_EQ(without_strided_shards(layout, mesh, {8, 8}),
            (Layout{parse_placements("S1,S1,_S(0,2)"), {{2}, {1, 0}}}));
}

TEST(StridedShards, OfManyRanksAreRewrittenWhereTheSizeDivides) {
  const Mesh mesh = mesh_of({128, 64});
  const Layout layout = make_layout("test", parse_placements("_S(0,64),S0"), {}, mesh, 1);
  EXPECT_EQ(without_strided_shards(layout, mesh, {8192}), (Layout{parse_placements("S0,S0"), {{1, 0}}}));
}

TEST(StridedShards, OfManyRanksAreKeptWhereTheSizeDoesNotDivide) {
  const Mesh mesh = mesh_of({128, 64});
  const Layout layout = make_layout("test", parse_placements("_S(0,64),S0"), {}, mesh, 1);
  EXPECT_EQ(without_strided_shards(layout, mesh, {128 * 64 + 1}), layout);
}

}  // namespace
}  // namespace funcol::layout_test
