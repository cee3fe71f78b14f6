#include "propagation/rules/reshape.h"

#include <gtest/gtest.h>

#include <numeric>

#include "propagation/rules/cut_and_run.h"

namespace funcol::test::reshape_test {
namespace {

using Groups = std::vector<DimGroup>;

OpCall view(const Shape& from, const Shape& to) {
  return CallOf("aten::view").with("self", tensor(from)).with("size", integers(to)).gives(to);
}

Mesh mesh(const std::vector<int64_t>& sizes) { return {sizes, {}, {}}; }

TEST(DimGroups, PairWhatHoldsTheSameIndices) {
  EXPECT_EQ(dim_groups({2, 3, 4}, {6, 2, 2}), (Groups{{{0, 1}, {0}}, {{2}, {1, 2}}}));
}

TEST(DimGroups, LeaveDimsOfOneElementAlone) {
  EXPECT_EQ(dim_groups({1, 4}, {4, 1, 1}), (Groups{{{0}, {}}, {{1}, {0}}, {{}, {1}}, {{}, {2}}}));
}

TEST(DimGroups, OfAScalar) {
  EXPECT_EQ(dim_groups({}, {}), Groups{});
  EXPECT_EQ(dim_groups({}, {1}), (Groups{{{}, {0}}}));
}

TEST(FlatIndices, GoThroughTheLastDimFirst) {
  EXPECT_EQ(flat_indices({3, 4}, {{{1, 2}}, {{0, 2}}}), (Intervals{{4, 2}, {8, 2}}));
}

TEST(FlatIndices, OfAllBehindAreJoined) {
  EXPECT_EQ(flat_indices({3, 4}, {{{1, 2}}, {{0, 4}}}), (Intervals{{4, 8}}));
}

TEST(FlatIndices, OfNothingAreNone) { EXPECT_EQ(flat_indices({3, 4}, {{{1, 2}}, {}}), Intervals{}); }

TEST(Divisors, AreAscending) { EXPECT_EQ(divisors(12), (Shape{1, 2, 3, 4, 6, 12})); }

TEST(ReshapeRules, AFlattenedOuterDimStaysAShard) {
  EXPECT_TRUE(has_row(view({4, 6}, {24}), "S0 <- S0"));
  EXPECT_TRUE(is_legal(view({4, 6}, {24}), {"S0"}, {"S0"}, mesh({2})));
}

TEST(ReshapeRules, AFlattenedInnerDimIsCutInPieces) {
  EXPECT_TRUE(has_row(view({4, 6}, {24}), "_S(0, 4) <- S(1)"));
  EXPECT_TRUE(is_legal(view({4, 6}, {24}), {"_S(0, 4)"}, {"S1"}, mesh({3})));
  EXPECT_FALSE(is_legal(view({4, 6}, {24}), {"_S(0, 2)"}, {"S1"}, mesh({3})));
}

TEST(ReshapeRules, PiecesBecomeAnInnerDim) {
  EXPECT_TRUE(has_row(view({24}, {4, 6}), "S(1) <- _S(0, 4)"));
  EXPECT_TRUE(is_legal(view({24}, {4, 6}), {"S1"}, {"_S(0, 4)"}, mesh({3})));
}

TEST(ReshapeRules, AnUnevenInnerDimIsFlattenedInPieces) {
  EXPECT_TRUE(is_legal(view({4, 5}, {20}), {"_S(0, 4)"}, {"S1"}, mesh({3})));
}

TEST(ReshapeRules, AnUnevenOuterDimIsNotFlattened) {
  EXPECT_FALSE(is_legal(view({5, 4}, {20}), {"S0"}, {"S0"}, mesh({3})));
}

TEST(ReshapeRules, ADimIsNotUnflattenedWhereNoRowEnds) {
  EXPECT_TRUE(is_legal(view({24}, {4, 6}), {"S0"}, {"S0"}, mesh({2})));
  EXPECT_FALSE(is_legal(view({24}, {4, 6}), {"S0"}, {"S0"}, mesh({3})));
}

TEST(ReshapeRules, AnotherAxisThatCutsTheOuterDimLeavesFewerPieces) {
  const auto call = view({4, 6}, {24});
  EXPECT_TRUE(is_legal(call, {"S0,_S(0, 2)"}, {"S0,S1"}, mesh({2, 3})));
  EXPECT_FALSE(is_legal(call, {"S0,_S(0, 4)"}, {"S0,S1"}, mesh({2, 3})));
  EXPECT_TRUE(is_legal(call, {"_S(0, 4),S0"}, {"S1,S0"}, mesh({3, 2})));
}

TEST(ReshapeRules, AnOuterDimThatIsCutUpLeavesAPlainShard) {
  EXPECT_TRUE(has_row(view({4, 6}, {24}), "S0 <- S1"));
  EXPECT_TRUE(is_legal(view({4, 6}, {24}), {"S0,S0"}, {"S0,S1"}, mesh({4, 3})));
}

TEST(ReshapeRules, DimsThatStayKeepAnyShards) {
  EXPECT_EQ(shard_rows_of(view({5, 2, 3}, {5, 6})),
            (std::vector<std::string>{"S0 <- S0", "S1 <- S1", "S1 <- S2", "_S(1, 2) <- S(2)"}));
  EXPECT_TRUE(is_legal(view({5, 2, 3}, {5, 6}), {"S0"}, {"S0"}, mesh({3})));
}

TEST(ReshapeRules, TheOrderOfAxesStays) {
  const auto call = view({4, 6}, {24});
  const auto shards = parse_placements("S0,S0");
  const auto axes = mesh({2, 2});
  const auto first_cut_first = make_layout("test", shards, {{0, 1}}, axes, 2);
  const auto last_cut_first = make_layout("test", shards, {{1, 0}}, axes, 1);
  const auto rows = rows_of(call);
  EXPECT_FALSE(rows.is_legal(call, {{last_cut_first}, {first_cut_first}}, axes));
  EXPECT_TRUE(
      rows.is_legal(call, {{last_cut_first}, {make_layout("test", shards, {{1, 0}}, axes, 2)}}, axes));
}

TEST(ReshapeRules, CutsThroughPiecesAreLookedAtRankByRank) {
  EXPECT_FALSE(is_legal(view({4, 12}, {48}), {"_S(0, 2),S0"}, {"_S(0, 2),S1"}, mesh({2, 3})));
  EXPECT_TRUE(is_legal(view({48}, {4, 12}), {"S1,S1"}, {"_S(0, 4),_S(0, 4)"}, mesh({2, 3})));
}

TEST(ReshapeRules, NoElementsCannotBeCut) {
  EXPECT_TRUE(shard_rows_of(view({0, 4}, {2, 0})).empty());
  EXPECT_TRUE(has_row(view({0, 4}, {2, 0}), "P(sum) <- P(sum)"));
}

class Reshape : public ::testing::TestWithParam<std::pair<Shape, Shape>> {};

TEST_P(Reshape, OfPartsIsThePartOfTheWhole) {
  const auto op = [](const std::vector<Numbers>& inputs, const Shape& shape) {
    return Numbers{shape, inputs.at(0).values};
  };
  EXPECT_TRUE(all_rows_are_right(view(GetParam().first, GetParam().second), op));
}

const Mesh kTwoRanks{{2}, {}, {}};

Layout on_two_ranks(const Placement& placement, const Shape& shape) {
  return make_layout("test", {placement}, {}, kTwoRanks, static_cast<int64_t>(shape.size()));
}

// The numbers of the elements that each of two ranks holds.
std::vector<std::vector<double>> held(const Shape& shape, const Placement& placement) {
  Numbers whole{shape, std::vector<double>(num_elements(shape))};
  std::iota(whole.values.begin(), whole.values.end(), 0);
  const auto layout = on_two_ranks(placement, shape);
  return {local_part(whole, layout, kTwoRanks, {0}).values, local_part(whole, layout, kTwoRanks, {1}).values};
}

// Returns true if some shard of the output has the elements of the input's shard of `dim`. Tries all.
bool could_stay(const Shape& from, const Shape& to, int64_t dim) {
  const auto wanted = held(from, Placement::shard(dim));
  for (size_t i = 0; i < to.size(); ++i) {
    for (const int64_t num_pieces : divisors(num_elements(to))) {
      if (held(to, Placement::shard(static_cast<int64_t>(i), num_pieces)) == wanted) {
        return !wanted[1].empty();
      }
    }
  }
  return false;
}

// Returns true if a row keeps the input's shard of `dim`.
bool is_pinned(const Shape& from, const Shape& to, int64_t dim) {
  const auto call = view(from, to);
  const auto rows = rows_of(call);
  return std::ranges::any_of(rows.rows, [&](const Row& row) {
    const auto input = with_split(row.inputs.at(0), 1);
    const auto output = with_split(row.outputs.at(0).value_or(Placement::replicate()), 1);
    return input == Placement::shard(dim) &&
           rows.is_legal(call, {{on_two_ranks(output, to)}, {on_two_ranks(input, from)}}, kTwoRanks);
  });
}

TEST_P(Reshape, ShardsStayWhereverTheyCould) {
  const auto& [from, to] = GetParam();
  std::vector<int64_t> lost;
  for (int64_t dim = 0; dim < static_cast<int64_t>(from.size()); ++dim) {
    if (could_stay(from, to, dim) && !is_pinned(from, to, dim)) {
      lost.push_back(dim);
    }
  }
  EXPECT_EQ(lost, Shape{});
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Reshape,
    ::testing::Values(std::pair(Shape{4, 6}, Shape{24}), std::pair(Shape{24}, Shape{4, 6}),
                      std::pair(Shape{2, 3, 4}, Shape{6, 4}), std::pair(Shape{6, 4}, Shape{2, 3, 4}),
                      std::pair(Shape{2, 3, 4}, Shape{2, 12}), std::pair(Shape{4, 6}, Shape{6, 4}),
                      std::pair(Shape{4, 6}, Shape{8, 3}), std::pair(Shape{5, 3}, Shape{15}),
                      std::pair(Shape{1, 6, 1}, Shape{2, 1, 3}), std::pair(Shape{7}, Shape{7}),
                      std::pair(Shape{2, 6, 3}, Shape{4, 9})));

}  // namespace
}  // namespace funcol::test::reshape_test
