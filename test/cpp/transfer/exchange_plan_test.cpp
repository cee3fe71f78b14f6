#include "transfer/exchange_plan.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace funcol::exchange_plan_test {
namespace {

Layout layout(const char* placements, const Mesh& mesh, ShardOrder order = {}) {
  return make_layout("test", parse_placements(placements), std::move(order), mesh, 2);
}

TEST(Positions, AreThoseOfTheIndicesThatAreHeld) {
  EXPECT_EQ(positions({{2, 4}}, {{0, 3}, {5, 3}}), (Intervals{{2, 2}}));
}

TEST(Positions, OfSeveralRunsFollowEachOther) {
  EXPECT_EQ(positions({{0, 1}, {4, 2}, {9, 1}}, {{0, 10}}), (Intervals{{0, 1}, {4, 2}, {9, 1}}));
}

TEST(Positions, OfWhatIsNotHeldAreNone) { EXPECT_TRUE(positions({{0, 4}}, {{4, 4}}).empty()); }

TEST(Positions, InNothingAreNone) { EXPECT_TRUE(positions({{0, 4}}, {}).empty()); }

TEST(Append, JoinsWithTheLastRun) {
  Intervals runs{{0, 2}};
  append(runs, {2, 3});
  append(runs, {0, 1});
  EXPECT_EQ(runs, (Intervals{{0, 5}, {0, 1}}));
}

TEST(GroupRanks, CountUpAlongTheLastAxisFirst) {
  const Mesh mesh{{2, 3, 2}, {}, {}};
  const GroupRanks ranks(mesh, axis_set(0) | axis_set(2), {1, 2, 0});
  EXPECT_EQ(ranks.size(), 4);
  EXPECT_EQ(ranks.own_rank(), 2);
  EXPECT_EQ(ranks.coordinate(1), (Coordinate{0, 2, 1}));
}

TEST(GroupRanks, StandWhereTheirMembersDo) {
  const Mesh mesh{{3}, {}, {}};
  const GroupRanks ranks(mesh, axis_set(0), {0}, {2, 0, 1});
  EXPECT_EQ(ranks.coordinate(0), Coordinate{2});
  EXPECT_EQ(ranks.own_rank(), 1);
  EXPECT_EQ(ranks.rank_of({2}), 0);
}

TEST(Exchange, SendsAnEqualShareToEveryRankBetweenTwoDims) {
  const Mesh mesh{{2}, {}, {}};
  const auto exchange =
      plan_exchange(mesh, layout("S0", mesh), layout("S1", mesh), {4, 6}, GroupRanks(mesh, 1, {1}));
  EXPECT_EQ(exchange.sent[0].selection, (Selection{{1, {{0, 3}}}}));
  EXPECT_EQ(exchange.sent[1].selection, (Selection{{1, {{3, 3}}}}));
  EXPECT_EQ(exchange.received[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(exchange.shape_after, (std::vector<int64_t>{4, 3}));
}

TEST(Exchange, TakesFromItselfWhatAlsoOthersHold) {
  const Mesh mesh{{2, 2}, {}, {}};
  const auto exchange =
      plan_exchange(mesh, layout("R,S0", mesh), layout("S1,R", mesh), {4, 4}, GroupRanks(mesh, 0b11, {1, 0}));
  // Of the two ranks that hold rows 0 and 1 the one in the same row of the mesh sends them: itself.
  EXPECT_EQ(exchange.received[0].numel, 0);
  EXPECT_EQ(exchange.received[2].numel, 4);
  EXPECT_EQ(exchange.received[3].numel, 4);
}

TEST(Exchange, OfPartialValuesIsRefused) {
  const Mesh mesh{{2}, {}, {}};
  EXPECT_THROW(plan_exchange(mesh, layout("P", mesh), layout("S0", mesh), {4, 4}, GroupRanks(mesh, 1, {0})),
               std::logic_error);
}

}  // namespace
}  // namespace funcol::exchange_plan_test
