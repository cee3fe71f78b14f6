#include "transfer/dtensors/rank_transfer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace funcol::python::rank_transfer_test {
namespace {

TransferKey key_of(const std::string& placements, std::vector<int64_t> shape, int64_t owner) {
  TransferKey key{0, {parse_placements(placements), {}}, {}, std::move(shape), 4};
  key.owner = owner;
  return key;
}

TEST(BytesOfAMove, AreTheWholeAndAShard) {
  const Mesh mesh{{4}, {}, {}};
  EXPECT_EQ(bytes_of_move(key_of("S0", {8, 4}, kEveryRank), mesh, /*is_on_cpu=*/false), (32 + 8) * 4);
  EXPECT_EQ(bytes_of_move(key_of("S0", {8, 4}, 0), mesh, /*is_on_cpu=*/true), (32 + 8) * 4);
}

TEST(BytesOfAMove, CountWhatGlooGathersInABufferOfItsOwn) {
  const Mesh mesh{{4}, {}, {}};
  EXPECT_EQ(bytes_of_move(key_of("S0", {8, 4}, kEveryRank), mesh, /*is_on_cpu=*/true), (64 + 8) * 4);
}

TEST(BytesOfAMove, CountTheLongestShardForEveryRankOfAGather) {
  const Mesh mesh{{4}, {}, {}};  // rows 2, 2, 1, 0
  EXPECT_EQ(bytes_of_move(key_of("S0", {5, 2}, kEveryRank), mesh, /*is_on_cpu=*/false), (16 + 4) * 4);
  EXPECT_EQ(bytes_of_move(key_of("S0", {5, 2}, 3), mesh, /*is_on_cpu=*/false), (10 + 4) * 4);
}

TEST(BytesOfAMove, CountTheTensorBeforeTheLastGatherOfSeveral) {
  const Mesh apart{{2, 4}, {}, {}};
  EXPECT_EQ(bytes_of_move(key_of("S0,S1", {8, 8}, kEveryRank), apart, false), (64 + 32 + 8) * 4);
  const Mesh together{{2, 4}, {}, {3}};
  EXPECT_EQ(bytes_of_move(key_of("S0,S1", {8, 8}, kEveryRank), together, false), (64 + 8) * 4);
}

TEST(BytesOfAMove, AreNoneForATensorThatIsWholeAlready) {
  const Mesh mesh{{4}, {}, {}};
  EXPECT_EQ(bytes_of_move(key_of("R", {8, 4}, kEveryRank), mesh, false), 0);
}

}  // namespace
}  // namespace funcol::python::rank_transfer_test
