#include "transfer/block_transport.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "transfer/thread_mesh.h"

namespace funcol::block_transport_test {
namespace {

using test::shard;

// Sizes of the mesh, layouts before and after, shape.
using Case = std::tuple<std::vector<int64_t>, std::string, std::string, std::vector<int64_t>>;

// A layout is written "S0,S0" or, with the axes of dim 0 in another order, "S0,S0/1,0".
Layout parse(const std::string& text, const Mesh& mesh) {
  const auto slash = text.find('/');
  ShardOrder order;
  if (slash != std::string::npos) {
    order.emplace_back();
    for (size_t i = slash + 1; i < text.size(); i += 2) {
      order[0].push_back(text[i] - '0');
    }
  }
  return make_layout("test", parse_placements(text.substr(0, slash)), order, mesh, 2);
}

class Transports : public testing::TestWithParam<Case> {};

TEST_P(Transports, BringEveryRankItsNewShard) {
  const auto& [sizes, before_text, after_text, shape] = GetParam();
  const Mesh mesh{sizes, {}, {}};
  const auto before = parse(before_text, mesh);
  const auto after = parse(after_text, mesh);
  const auto whole = at::arange(shape[0] * shape[1]).view(shape);
  const AxisSet all = (AxisSet{1} << sizes.size()) - 1;
  const GroupRanks ranks(mesh, all, Coordinate(sizes.size(), 0));
  std::vector<BlockTransport> transports;
  std::vector<std::vector<at::Tensor>> sent;
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& coordinate = ranks.coordinate(rank);
    transports.emplace_back(plan_exchange(mesh, before, after, shape, GroupRanks(mesh, all, coordinate)));
    const auto& transport = transports.back();
    ASSERT_TRUE(transport.is_complete());
    sent.push_back(
        transport.pack(shard(whole, before, mesh, coordinate)).split_with_sizes(transport.sent_numels()));
  }
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<at::Tensor> received;
    for (int64_t other = 0; other < ranks.size(); ++other) {
      received.push_back(sent[other][rank]);
      EXPECT_EQ(received.back().numel(), transports[rank].received_numels()[other]);
    }
    const auto flat = at::cat(received);
    const auto result = transports[rank].unpack(flat);
    EXPECT_TRUE(at::equal(result, shard(whole, after, mesh, ranks.coordinate(rank)))) << "rank " << rank;
    const auto filled = at::zeros(transports[rank].shape_after(), at::kLong);
    transports[rank].unpack_into(flat, filled);
    EXPECT_TRUE(at::equal(filled, result)) << "rank " << rank;
    if (transports[rank].unpacks_to_view()) {
      EXPECT_TRUE(result.is_alias_of(flat) && result.is_contiguous());
    }
  }
}

const std::vector<std::vector<int64_t>> kShapes{{8, 8}, {5, 3}, {1, 7}, {0, 4}, {12, 6}};

INSTANTIATE_TEST_SUITE_P(OneAxis, Transports,
                         testing::Combine(testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2},
                                                          std::vector<int64_t>{3}),
                                          testing::Values("S0", "S1", "_S(0, 2)", "_S(1, 3)"),
                                          testing::Values("S0", "S1", "_S(0, 3)", "R"),
                                          testing::ValuesIn(kShapes)));

INSTANTIATE_TEST_SUITE_P(
    TwoAxes, Transports,
    testing::Combine(testing::Values(std::vector<int64_t>{2, 2}, std::vector<int64_t>{3, 2}),
                     testing::Values("S0,S0", "S0,S0/1,0", "S1,S0", "R,S0", "_S(0, 2),S1", "S1,S1"),
                     testing::Values("S0,S0/1,0", "S0,S1", "S1,S1", "S0,R", "R,S1", "_S(1, 2),_S(1, 2)",
                                     "R,R"),
                     testing::ValuesIn(kShapes)));

TEST(Transport, OfAWholeTensorToOneRankCopiesNothing) {
  const Mesh mesh{{2, 2}, {}, {}};
  const BlockTransport transport(plan_exchange(mesh, parse("S0,S0", mesh), parse("S0,S0/1,0", mesh), {8, 2},
                                               GroupRanks(mesh, 0b11, {0, 1})));
  const auto local = at::arange(4).view({2, 2});
  EXPECT_TRUE(transport.pack(local).is_alias_of(local));
}

}  // namespace
}  // namespace funcol::block_transport_test
