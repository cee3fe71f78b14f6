#include "planner/transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/legal.h"
#include "planner/mesh_changes.h"

namespace funcol::transfer_test {
namespace {

using test::change_of;
using test::ranked;
using ::testing::Range;

// The elements of the whole tensor that each rank holds, counted along the last dim first.
std::map<int64_t, std::set<int64_t>> elements_of(const RankedMesh& mesh, const Layout& layout,
                                                 const std::vector<int64_t>& shape) {
  std::map<int64_t, std::set<int64_t>> held;
  const auto coordinates = test::coordinates(mesh.mesh);
  for (size_t place = 0; place < coordinates.size(); ++place) {
    const auto elements = test::elements(layout, mesh.mesh, shape, coordinates[place]);
    held[mesh.ranks[place]] = {elements.begin(), elements.end()};
  }
  return held;
}

// Moves the elements, and expects that each rank gets what it lacks, once, from ranks that have it.
void expect_right(const MeshChangeTask& task) {
  auto held = elements_of(task.src_mesh, task.src, task.shape);
  std::map<int64_t, std::set<int64_t>> received;
  for (const auto& message : all_messages(task).sent) {
    ASSERT_GT(message.size, 0);
    for (const int64_t element : test::elements_of(message, task.shape)) {
      ASSERT_TRUE(held[message.sender].contains(element)) << "rank " << message.sender << " sends it";
      ASSERT_FALSE(held[message.receiver].contains(element)) << "rank " << message.receiver << " has it";
      ASSERT_TRUE(received[message.receiver].insert(element).second) << "sent twice";
    }
  }
  for (const auto& [rank, wanted] : elements_of(task.dst_mesh, task.dst, task.shape)) {
    std::set<int64_t> has;
    std::ranges::set_intersection(held[rank], wanted, std::inserter(has, has.begin()));
    has.insert(received[rank].begin(), received[rank].end());
    EXPECT_EQ(has, wanted) << "rank " << rank;
    received.erase(rank);
  }
  EXPECT_TRUE(received.empty()) << "a rank outside of the target receives";
}

// The messages of `all` that `rank` sends, receives or keeps.
TransferMessages of_rank(TransferMessages all, int64_t rank) {
  const auto is_others = [rank](const TransferMessage& one) {
    return one.sender != rank && one.receiver != rank;
  };
  std::erase_if(all.sent, is_others);
  std::erase_if(all.kept, is_others);
  return all;
}

// Adds up the messages of all ranks.
TransferLoads counted(const MeshChangeTask& task) {
  std::map<int64_t, int64_t> sent;
  std::map<int64_t, int64_t> received;
  TransferLoads loads;
  for (const auto& message : all_messages(task).sent) {
    sent[message.sender] += message.size * task.itemsize;
    received[message.receiver] += message.size * task.itemsize;
    loads.total += message.size * task.itemsize;
  }
  const auto before = elements_of(task.src_mesh, task.src, task.shape);
  const auto after = elements_of(task.dst_mesh, task.dst, task.shape);
  const auto bytes = [&](const auto& held, int64_t rank) {
    return held.contains(rank) ? std::ssize(held.at(rank)) * task.itemsize : 0;
  };
  for (const int64_t rank : all_ranks(task)) {
    loads.busiest_sender = std::max(loads.busiest_sender, sent[rank]);
    loads.busiest_receiver = std::max(loads.busiest_receiver, received[rank]);
    loads.busiest_copier = std::max(loads.busiest_copier, sent[rank] + bytes(after, rank));
    loads.peak = std::max(loads.peak, bytes(before, rank) + sent[rank] + received[rank] + bytes(after, rank));
  }
  loads.bound = loads.busiest_sender;
  return loads;
}

// The least that the busiest sender sends over all ways to choose a sender for each element and receiver.
class AllChoices {
 public:
  explicit AllChoices(const MeshChangeTask& task) {
    const auto held = elements_of(task.src_mesh, task.src, task.shape);
    for (const auto& [rank, wanted] : elements_of(task.dst_mesh, task.dst, task.shape)) {
      for (const int64_t element : wanted) {
        std::vector<int64_t> holders;
        for (const auto& [holder, elements] : held) {
          if (elements.contains(element)) {
            holders.push_back(holder);
          }
        }
        if (!std::ranges::binary_search(holders, rank)) {
          holders_.push_back(std::move(holders));
        }
      }
    }
    choose(0, 0);
  }

  size_t num_choices() const { return holders_.size(); }
  int64_t least() const { return least_; }

 private:
  // Leaves out what can be no better.
  void choose(size_t number, int64_t busiest) {
    if (busiest >= least_) {
      return;
    }
    if (number == holders_.size()) {
      least_ = busiest;
      return;
    }
    for (const int64_t holder : holders_[number]) {
      const int64_t load = ++loads_[holder];
      choose(number + 1, std::max(busiest, load));
      --loads_[holder];
    }
  }

  std::vector<std::vector<int64_t>> holders_;
  std::map<int64_t, int64_t> loads_;
  int64_t least_ = INT64_MAX;
};

TEST(Transfer, SharesWhatIsAskedAmongReplicas) {
  const auto transfer = plan_transfer(change_of(ranked({2}), {"R"}, ranked({4}, 1), {"S0"}, {8}, 1));
  EXPECT_EQ(to_string(transfer),
            "0 -> 2: 2 B of [2:4]\n"
            "0 -> 3: 1 B of [4:6], from element 0\n"
            "1 -> 3: 1 B of [4:6], from element 1\n"
            "1 -> 4: 2 B of [6:8]\n");
  EXPECT_EQ(transfer.loads.total, 6);
  EXPECT_EQ(transfer.loads.busiest_sender, 3);
  EXPECT_EQ(transfer.loads.busiest_receiver, 2);
  EXPECT_EQ(transfer.loads.bound, 3);
}

TEST(Transfer, SendsNothingToARankThatHoldsWhatItWants) {
  const auto task = change_of(ranked({2, 2}), {"R,S0"}, ranked({2}), {"S0"}, {8, 3});
  const auto messages = all_messages(task);
  EXPECT_TRUE(messages.sent.empty());
  EXPECT_EQ(messages.kept, (std::vector<TransferMessage>{{0, 0, {{{0, 4}}, {{0, 3}}}, 0, 12},
                                                         {1, 1, {{{4, 4}}, {{0, 3}}}, 0, 12}}));
  EXPECT_EQ(plan_transfer(task).loads.bound, 0);
}

TEST(Transfer, MovesAScalar) {
  const auto transfer = plan_transfer(change_of(ranked({2}), {"R"}, ranked({3}, 1), {"R"}, {}));
  EXPECT_EQ(to_string(transfer), "0 -> 2: 4 B of []\n1 -> 3: 4 B of []\n");
  expect_right(transfer.task);
}

TEST(Transfer, MovesNothingOfAnEmptyTensor) {
  const auto task = change_of(ranked({2}), {"S0"}, ranked({3}, 5), {"S1"}, {0, 4});
  EXPECT_EQ(all_messages(task), TransferMessages());
  EXPECT_EQ(plan_transfer(task).loads, TransferLoads());
}

TEST(Transfer, HasAMatrixOfBytes) {
  const auto transfer = plan_transfer(change_of(ranked({2}), {"S0"}, ranked({2}, 2), {"S1"}, {2, 4}));
  const std::vector<std::vector<int64_t>> expected{{0, 0, 8, 8}, {0, 0, 8, 8}, {0, 0, 0, 0}, {0, 0, 0, 0}};
  EXPECT_EQ(bytes_matrix(transfer), expected);
  EXPECT_EQ(all_ranks(transfer.task), (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(Transfer, KnowsTheMemoryThatItTakes) {
  const auto loads = plan_transfer(change_of(ranked({2}), {"S0"}, ranked({2}), {"S1"}, {4, 4}, 1)).loads;
  EXPECT_EQ(loads.busiest_copier, 4 + 8);
  EXPECT_EQ(loads.peak, 8 + 4 + 4 + 8);
}

TEST(Transfer, RefusesPartialValues) {
  try {
    plan_transfer(change_of(ranked({2}), {"P"}, ranked({2}), {"R"}, {4}));
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "plan_transfer: the source layout P(sum) has partial values. Reduce them before.");
  }
}

TEST(Transfer, RefusesARankThatComesTwice) {
  auto mesh = ranked({2});
  mesh.ranks = {3, 3};
  EXPECT_THROW(plan_transfer(change_of(ranked({2}), {"R"}, mesh, {"R"}, {4})), std::invalid_argument);
}

TEST(Transfer, RefusesAMeshWithTooFewRanks) {
  auto mesh = ranked({2});
  mesh.ranks = {3};
  EXPECT_THROW(plan_transfer(change_of(mesh, {"R"}, ranked({2}), {"R"}, {4})), std::invalid_argument);
}

class RandomTransfer : public ::testing::TestWithParam<int> {};

TEST_P(RandomTransfer, GivesEachRankWhatItLacksOnce) {
  test::RandomLimits limits;
  limits.max_axes = 3;
  test::RandomChange changes(static_cast<uint32_t>(GetParam()), limits, 12);
  const auto task = changes.make();
  SCOPED_TRACE(test::described(task));
  expect_right(task);
}

TEST_P(RandomTransfer, PlansTheSameMessagesForARankAloneAndForAll) {
  test::RandomLimits limits;
  limits.max_axes = 4;
  const auto task = test::RandomChange(static_cast<uint32_t>(GetParam()), limits, 24).make();
  SCOPED_TRACE(test::described(task));
  const auto all = all_messages(task);
  for (const int64_t rank : all_ranks(task)) {
    EXPECT_EQ(messages_of(task, rank), of_rank(all, rank)) << "rank " << rank;
  }
  EXPECT_EQ(messages_of(task, 1000), TransferMessages());
}

TEST_P(RandomTransfer, KnowsItsLoadsWithoutMessages) {
  test::RandomLimits limits;
  limits.max_axes = 4;
  const auto task = test::RandomChange(static_cast<uint32_t>(GetParam()), limits, 24).make();
  EXPECT_EQ(plan_transfer(task).loads, counted(task)) << test::described(task);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTransfer, Range(0, 300));

class SmallTransfer : public ::testing::TestWithParam<int> {};

TEST_P(SmallTransfer, HasTheBusiestSenderOfTheBestChoice) {
  test::RandomLimits limits;
  limits.max_axes = 2;
  limits.max_dims = 2;
  limits.axis_sizes = {1, 2, 2, 3};
  test::RandomChange changes(static_cast<uint32_t>(GetParam()), limits, 6);
  constexpr size_t kMostChoices = 12;
  for (int tries = 0; tries < 200; ++tries) {
    auto task = changes.make();
    task.itemsize = 1;
    for (auto& size : task.shape) {
      size = size % 4 + (size > 4 ? 1 : 0);
    }
    if (plan_transfer(task).loads.total > static_cast<int64_t>(kMostChoices)) {
      continue;
    }
    const AllChoices choices(task);
    if (choices.num_choices() == 0) {
      continue;
    }
    EXPECT_EQ(plan_transfer(task).loads.busiest_sender, choices.least()) << test::described(task);
    return;
  }
  FAIL() << "no small case";
}

INSTANTIATE_TEST_SUITE_P(Seeds, SmallTransfer, Range(0, 200));

struct LargeCase {
  std::vector<int64_t> src_sizes;
  std::string src;
  std::vector<int64_t> dst_sizes;
  std::string dst;
  std::vector<int64_t> shape;
};

void PrintTo(const LargeCase& large, std::ostream* out) { *out << large.src << " to " << large.dst; }

class LargeTransfer : public ::testing::TestWithParam<LargeCase> {};

// The bound counts what is asked of each set of replicas, without looking at who was chosen.
TEST_P(LargeTransfer, ReachesTheBound) {
  const auto& large = GetParam();
  for (const int64_t first : {0, 32, 64}) {
    const auto transfer = plan_transfer(change_of(ranked(large.src_sizes), {large.src},
                                                  ranked(large.dst_sizes, first), {large.dst}, large.shape));
    const auto& loads = transfer.loads;
    int64_t busiest = 0;
    for (const auto& row : bytes_matrix(transfer)) {
      busiest = std::max(busiest, std::accumulate(row.begin(), row.end(), int64_t{0}));
    }
    EXPECT_EQ(loads.busiest_sender, busiest) << "first target rank " << first;
    EXPECT_EQ(loads.busiest_sender, loads.bound) << "first target rank " << first;
    EXPECT_TRUE(first == 0 || loads.total > 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, LargeTransfer,
                         ::testing::Values(LargeCase{{4, 4, 4}, "S0,S1,S2", {8, 8}, "S1,S0", {256, 256, 256}},
                                           LargeCase{{4, 4, 4}, "R,S0,S1", {2, 4, 8}, "S1,R,S0", {999, 1001}},
                                           LargeCase{{64}, "R", {64}, "S0", {12345}},
                                           LargeCase{{64}, "S0", {8, 8}, "R,R", {12345}},
                                           LargeCase{{2, 32}, "R,S0", {32, 2}, "S1,_S(0, 2)", {100, 130}},
                                           LargeCase{{4, 16}, "R,R", {64}, "R", {1000, 77}}));

}  // namespace
}  // namespace funcol::transfer_test
