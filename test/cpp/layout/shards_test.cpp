#include "layout/shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "layout/naive_shards.h"

namespace funcol::shards_test {
namespace {

using test::Indices;
using ::testing::Combine;
using ::testing::Values;

// Adjacent intervals are joined, and none is empty, so equal lists of indices give equal intervals.
bool is_canonical(const Intervals& intervals) {
  for (size_t i = 0; i < intervals.size(); ++i) {
    if (intervals[i].size <= 0 || (i > 0 && intervals[i - 1].end() == intervals[i].begin)) {
      return false;
    }
  }
  return true;
}

using Cut = std::tuple<int64_t, int64_t, int64_t>;  // size, num_ranks, split_factor

std::string name_of_cut(const ::testing::TestParamInfo<Cut>& param) {
  const auto [size, num_ranks, split_factor] = param.param;
  return "size_" + std::to_string(size) + "_ranks_" + std::to_string(num_ranks) + "_split_" +
         std::to_string(split_factor);
}

class CutOfAnySize : public ::testing::TestWithParam<Cut> {
 protected:
  const int64_t size_ = std::get<0>(GetParam());
  const int64_t num_ranks_ = std::get<1>(GetParam());
  const int64_t split_factor_ = std::get<2>(GetParam());
  const Intervals whole_ = size_ > 0 ? Intervals{{0, size_}} : Intervals{};

  std::vector<Indices> shards_of(const Intervals& whole) const {
    std::vector<Indices> shards;
    shards.reserve(num_ranks_);
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      shards.push_back(test::listed(cut(whole, num_ranks_, rank, split_factor_)));
    }
    return shards;
  }
};

TEST_P(CutOfAnySize, GivesEveryRankWhatPyTorchDoes) {
  EXPECT_EQ(shards_of(whole_), test::strided_chunk(test::counted(size_), num_ranks_, split_factor_));
}

// A whole that is itself a shard: two pieces, the second before the first.
TEST_P(CutOfAnySize, OfIntervalsGivesEveryRankWhatPyTorchDoes) {
  const Intervals pieces{{100, size_ / 3 + 1}, {7, size_ + 1}};
  EXPECT_EQ(shards_of(pieces), test::strided_chunk(test::listed(pieces), num_ranks_, split_factor_));
}

TEST_P(CutOfAnySize, JoinsNeighboursAndHoldsNothingEmpty) {
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    EXPECT_TRUE(is_canonical(cut(whole_, num_ranks_, rank, split_factor_))) << "rank " << rank;
  }
}

TEST_P(CutOfAnySize, LongestShardIsTheLongest) {
  size_t longest = 0;
  for (const auto& shard : test::strided_chunk(test::counted(size_), num_ranks_, split_factor_)) {
    longest = std::max(longest, shard.size());
  }
  EXPECT_EQ(longest_shard(size_, num_ranks_, split_factor_), static_cast<int64_t>(longest));
}

TEST_P(CutOfAnySize, LongestShardIsThatOfIndexZero) {
  EXPECT_EQ(longest_shard(size_, num_ranks_, split_factor_),
            num_indices(cut(whole_, num_ranks_, 0, split_factor_)));
}

INSTANTIATE_TEST_SUITE_P(Sizes, CutOfAnySize,
                         Combine(Values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 24, 31, 97),
                                 Values(1, 2, 3, 4, 5, 8), Values(1, 2, 3, 4, 6, 7)),
                         name_of_cut);

TEST(Cut, OfTheWorkedCaseIsAChunkOfEveryPiece) {
  EXPECT_EQ(cut({{0, 8}}, 2, 1, 2), (Intervals{{2, 2}, {6, 2}}));
}

TEST(CommonIndices, KeepGaps) {
  EXPECT_EQ(common_indices({{0, 6}}, {{1, 2}, {4, 5}}), (Intervals{{1, 2}, {4, 2}}));
}

TEST(CommonIndices, AreJoinedWhereTheyTouch) {
  EXPECT_EQ(common_indices({{0, 2}, {2, 2}}, {{1, 3}}), (Intervals{{1, 3}}));
}

TEST(NumIndices, CountsEveryInterval) { EXPECT_EQ(num_indices({{4, 3}, {0, 2}, {9, 1}}), 6); }

struct Held {
  std::vector<int64_t> mesh;
  std::string placements;
  ShardOrder order;
};

void PrintTo(const Held& held, std::ostream* out) {
  *out << held.placements << " on " << test::joined(held.mesh);
}

using HeldShape = std::tuple<Held, std::vector<int64_t>>;

class HeldByEveryRank : public ::testing::TestWithParam<HeldShape> {
 protected:
  const std::vector<int64_t> shape_ = std::get<1>(GetParam());
  const Mesh mesh_{std::get<0>(GetParam()).mesh, {}, {}};
  const Layout layout_ =
      make_layout("test", parse_placements(std::get<0>(GetParam()).placements), std::get<0>(GetParam()).order,
                  mesh_, static_cast<int64_t>(shape_.size()));
};

TEST_P(HeldByEveryRank, AreTheIndicesThatPyTorchGivesIt) {
  for (const auto& coordinate : test::coordinates(mesh_)) {
    for (size_t dim = 0; dim < shape_.size(); ++dim) {
      const auto held = local_indices(layout_, mesh_, static_cast<int64_t>(dim), shape_[dim], coordinate);
      EXPECT_EQ(test::listed(held),
                test::naive_local_indices(layout_, mesh_, static_cast<int64_t>(dim), shape_[dim], coordinate))
          << "dim " << dim << " of rank " << test::joined(coordinate);
      EXPECT_TRUE(is_canonical(held));
    }
  }
}

TEST_P(HeldByEveryRank, IsAsLongAsItsIndicesAreMany) {
  for (const auto& coordinate : test::coordinates(mesh_)) {
    std::vector<int64_t> expected;
    expected.reserve(shape_.size());
    for (size_t dim = 0; dim < shape_.size(); ++dim) {
      expected.push_back(static_cast<int64_t>(
          test::naive_local_indices(layout_, mesh_, static_cast<int64_t>(dim), shape_[dim], coordinate)
              .size()));
    }
    EXPECT_EQ(local_shape(layout_, mesh_, shape_, coordinate), expected)
        << "rank " << test::joined(coordinate);
  }
}

const auto kLayouts = Values(
    Held{{1}, "S0", {}}, Held{{2}, "R", {}}, Held{{2}, "P", {}}, Held{{2}, "S0", {}}, Held{{4}, "S1", {}},
    Held{{5}, "_S(1,2)", {}}, Held{{2, 2}, "S0,S1", {}}, Held{{2, 2}, "S1,S1", {}},
    Held{{2, 2}, "S1,S1", {{}, {1, 0}}}, Held{{3, 2}, "S0,S0", {{1, 0}}}, Held{{3, 2}, "_S(0,2),S0", {}},
    Held{{2, 3}, "_S(0,3),S0", {}}, Held{{2, 3}, "S0,_S(0,4)", {}}, Held{{2, 1, 3}, "S1,S1,S1", {}},
    Held{{2, 3, 2}, "S1,S0,S1", {{1}, {2, 0}}}, Held{{2, 3, 2}, "S0,S0,S0", {{1, 2, 0}}},
    Held{{2, 2, 2}, "_S(0,4),_S(0,2),S0", {}}, Held{{2, 2, 2}, "S0,P(max),S1", {}});
INSTANTIATE_TEST_SUITE_P(Layouts, HeldByEveryRank,
                         Combine(kLayouts, Values(std::vector<int64_t>{8, 8}, std::vector<int64_t>{12, 24},
                                                  std::vector<int64_t>{0, 5}, std::vector<int64_t>{1, 1},
                                                  std::vector<int64_t>{7, 3}, std::vector<int64_t>{13, 17},
                                                  std::vector<int64_t>{5, 9, 4})));

constexpr int64_t kMostPieces = std::numeric_limits<int64_t>::max();

TEST(StridedShard, OfMorePiecesThanIndicesIsOnTheFirstRank) {
  EXPECT_EQ(cut({{0, 4}}, 2, 0, kMostPieces), (Intervals{{0, 4}}));
  EXPECT_TRUE(cut({{0, 4}}, 2, 1, kMostPieces).empty());
}

TEST(StridedShard, OfMorePiecesThanIndicesIsUneven) {
  const Mesh mesh{{2}, {}, {}};
  const Layout layout{{Placement::shard(0, kMostPieces)}, {{0}}};
  EXPECT_FALSE(is_cut_evenly(layout, mesh, 0, 4));
  EXPECT_TRUE(is_cut_evenly(layout, mesh, 0, 0));
}

struct WorkedCase {
  ShardOrder order;
  Coordinate coordinate;
  Intervals rows;
};

void PrintTo(const WorkedCase& worked, std::ostream* out) {
  *out << "rank " << test::joined(worked.coordinate);
}

class EightRowsOnTwoTimesTwoRanks : public ::testing::TestWithParam<WorkedCase> {};

TEST_P(EightRowsOnTwoTimesTwoRanks, AreHeldInTheShardOrder) {
  const Mesh mesh{{2, 2}, {}, {}};
  const Layout layout = make_layout("test", parse_placements("S0,S0"), GetParam().order, mesh, 1);
  EXPECT_EQ(local_indices(layout, mesh, 0, 8, GetParam().coordinate), GetParam().rows);
}

INSTANTIATE_TEST_SUITE_P(WorkedCases, EightRowsOnTwoTimesTwoRanks,
                         Values(WorkedCase{{{0, 1}}, {0, 0}, {{0, 2}}},
                                WorkedCase{{{0, 1}}, {0, 1}, {{2, 2}}},
                                WorkedCase{{{0, 1}}, {1, 0}, {{4, 2}}},
                                WorkedCase{{{1, 0}}, {0, 1}, {{4, 2}}},
                                WorkedCase{{{1, 0}}, {1, 0}, {{2, 2}}}));

}  // namespace
}  // namespace funcol::shards_test
