#include "transfer/packed_exchange.h"

#include <gtest/gtest.h>

namespace funcol::packed_exchange_test {
namespace {

std::vector<int64_t> numels(const std::vector<PeerBlock>& blocks) {
  std::vector<int64_t> found;
  found.reserve(blocks.size());
  for (const auto& block : blocks) {
    found.push_back(block.copy.numel());
  }
  return found;
}

TEST(PackedExchange, OfAGatherGivesOneBlockAndTakesOneOfEachRank) {
  const auto step = packed_all_gather("g", 0, {{{0, 3}}, {{3, 2}}}, {5, 2}, 1);
  EXPECT_EQ(numels(step.sent), (std::vector<int64_t>{4}));
  EXPECT_EQ(numels(step.received), (std::vector<int64_t>{6, 4}));
  EXPECT_EQ(step.shape_after, (std::vector<int64_t>{5, 2}));
}

TEST(PackedExchange, OfAScatterGivesABlockToEachRankAndTakesOne) {
  const auto step = packed_reduce_scatter("g", "sum", 1, {{{0, 2}}, {{2, 1}}, {}}, {2, 3}, 1);
  EXPECT_EQ(numels(step.sent), (std::vector<int64_t>{4, 2, 0}));
  EXPECT_EQ(numels(step.received), (std::vector<int64_t>{2}));
  EXPECT_EQ(step.shape_after, (std::vector<int64_t>{2, 1}));
}

TEST(PackedExchange, OfAnExchangeGivesAndTakesABlockOfEachRank) {
  const Mesh mesh{{2}, {}, {}};
  const auto layout = [&](const char* text) {
    return make_layout("test", parse_placements(text), {}, mesh, 2);
  };
  const auto step = packed_all_to_all(
      "g", plan_exchange(mesh, layout("S0"), layout("S1"), {3, 5}, GroupRanks(mesh, 1, {1})));
  EXPECT_EQ(numels(step.sent), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(numels(step.received), (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(step.shape_after, (std::vector<int64_t>{3, 2}));
}

TEST(PackedExchange, SignaturesTellKindsGroupsAndReductionsApartButNotDims) {
  const std::vector<Intervals> shards{{{0, 1}}, {{1, 1}}};
  const auto scatter = [&](const char* group, const char* op, int64_t dim) {
    return packed_reduce_scatter(group, op, dim, shards, {2, 2}, 0).signature();
  };
  EXPECT_EQ(scatter("g", "sum", 0), scatter("g", "sum", 1));
  EXPECT_NE(scatter("g", "sum", 0), scatter("h", "sum", 0));
  EXPECT_NE(scatter("g", "sum", 0), scatter("g", "max", 0));
  EXPECT_NE(scatter("g", "", 0), packed_all_gather("g", 0, shards, {2, 2}, 0).signature());
}

}  // namespace
}  // namespace funcol::packed_exchange_test
