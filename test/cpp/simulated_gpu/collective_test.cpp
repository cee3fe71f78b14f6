// Values of collectives, sends and receives.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include "simulated_gpu/thread_ranks.h"

namespace simulated_gpu::collective_test {
namespace {

class Worlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Collective, Worlds, ::testing::Values(1, 2, 3));

TEST_P(Worlds, AllReduceSums) {
  run_ranks(GetParam(), [](Rank& self) {
    Floats input(self.stream, {self.number(), 1}), output(self.stream, unset(2));
    expect_success(
        ncclAllReduce(input.data(), output.data(), 2, ncclFloat32, ncclSum, self.communicator, self.stream));
    const int sum = self.num_ranks * (self.num_ranks - 1) / 2;
    EXPECT_EQ(output.read(), (Values{static_cast<float>(sum), static_cast<float>(self.num_ranks)}));
    EXPECT_EQ(input.read(), (Values{self.number(), 1}));
  });
}

TEST_P(Worlds, AllReduceWorksInPlace) {
  run_ranks(GetParam(), [](Rank& self) {
    Floats data(self.stream, {1, 2});
    expect_success(
        ncclAllReduce(data.data(), data.data(), 2, ncclFloat32, ncclSum, self.communicator, self.stream));
    const auto num_ranks = static_cast<float>(self.num_ranks);
    EXPECT_EQ(data.read(), (Values{num_ranks, 2 * num_ranks}));
  });
}

TEST_P(Worlds, AllGatherWorksInPlace) {
  run_ranks(GetParam(), [](Rank& self) {
    Values expected;
    for (int rank = 0; rank < self.num_ranks; ++rank) expected.push_back(static_cast<float>(rank));
    Values before(expected.size(), -1);
    before[static_cast<size_t>(self.rank)] = self.number();
    Floats data(self.stream, before);
    expect_success(
        ncclAllGather(data.data() + self.rank, data.data(), 1, ncclFloat32, self.communicator, self.stream));
    EXPECT_EQ(data.read(), expected);
  });
}

TEST_P(Worlds, ReduceScatterGivesEachRankItsPart) {
  run_ranks(GetParam(), [](Rank& self) {
    Values parts;
    for (int rank = 0; rank < self.num_ranks; ++rank) parts.push_back(static_cast<float>(rank));
    Floats input(self.stream, parts), output(self.stream, unset(1));
    expect_success(ncclReduceScatter(input.data(), output.data(), 1, ncclFloat32, ncclSum, self.communicator,
                                     self.stream));
    EXPECT_EQ(output.read(), Values{self.number() * static_cast<float>(self.num_ranks)});
  });
}

TEST_P(Worlds, AllToAllTransposes) {
  run_ranks(GetParam(), [](Rank& self) {
    Values to_ranks, expected;
    for (int rank = 0; rank < self.num_ranks; ++rank) {
      to_ranks.push_back(self.number() * 10 + static_cast<float>(rank));
      expected.push_back(static_cast<float>(rank) * 10 + self.number());
    }
    Floats input(self.stream, to_ranks), output(self.stream, unset(to_ranks.size()));
    expect_success(ncclAlltoAll(input.data(), output.data(), 1, ncclFloat32, self.communicator, self.stream));
    EXPECT_EQ(output.read(), expected);
  });
}

TEST_P(Worlds, BroadcastGivesTheRootsValues) {
  run_ranks(GetParam(), [](Rank& self) {
    const int root = self.num_ranks - 1;
    Floats data(self.stream, {self.number()});
    expect_success(ncclBcast(data.data(), 1, ncclFloat32, root, self.communicator, self.stream));
    EXPECT_EQ(data.read(), Values{static_cast<float>(root)});
  });
}

TEST_P(Worlds, ReduceLeavesOtherRanksAlone) {
  run_ranks(GetParam(), [](Rank& self) {
    Floats input(self.stream, {1}), output(self.stream, unset(1));
    expect_success(
        ncclReduce(input.data(), output.data(), 1, ncclFloat32, ncclSum, 0, self.communicator, self.stream));
    EXPECT_EQ(output.read(), Values{self.rank == 0 ? static_cast<float>(self.num_ranks) : -1});
  });
}

TEST_P(Worlds, ScatterAndGatherAreInverse) {
  run_ranks(GetParam(), [](Rank& self) {
    Values all;
    for (int rank = 0; rank < self.num_ranks; ++rank) all.push_back(static_cast<float>(rank + 5));
    const bool is_root = self.rank == 0;
    Floats whole(self.stream, is_root ? all : unset(all.size())), part(self.stream, unset(1));
    expect_success(ncclScatter(whole.data(), part.data(), 1, ncclFloat32, 0, self.communicator, self.stream));
    EXPECT_EQ(part.read(), Values{self.number() + 5});
    Floats back(self.stream, unset(all.size()));
    expect_success(ncclGather(part.data(), back.data(), 1, ncclFloat32, 0, self.communicator, self.stream));
    EXPECT_EQ(back.read(), is_root ? all : unset(all.size()));
  });
}

TEST_P(Worlds, EmptyCollectivesFinish) {
  run_ranks(GetParam(), [](Rank& self) {
    expect_success(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, self.communicator, self.stream));
    EXPECT_EQ(cudaStreamSynchronize(self.stream), cudaSuccess);
  });
}

TEST_P(Worlds, ManyCollectivesMatchInTheirOrder) {
  run_ranks(GetParam(), [](Rank& self) {
    Floats data(self.stream, {1});
    float expected = 1;
    for (int i = 0; i < 20; ++i) {
      expect_success(
          ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, ncclMax, self.communicator, self.stream));
      expect_success(ncclBcast(data.data(), 1, ncclFloat32, 0, self.communicator, self.stream));
    }
    EXPECT_EQ(data.read(), Values{expected});
  });
}

TEST(Collective, PeersGetTheInputAsItWasAtTheCall) {
  run_ranks(2, [](Rank& self) {
    Floats data(self.stream, {self.number() + 1}), output(self.stream, unset(1));
    expect_success(
        ncclAllReduce(data.data(), output.data(), 1, ncclFloat32, ncclSum, self.communicator, self.stream));
    data.set({100});
    EXPECT_EQ(output.read(), Values{3});
  });
}

TEST(Collective, PremultipliedSumsUseEachRanksFactor) {
  run_ranks(2, [](Rank& self) {
    float factor = self.number() + 2;
    ncclRedOp_t op;
    expect_success(
        ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, self.communicator));
    Floats data(self.stream, {10});
    expect_success(
        ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, op, self.communicator, self.stream));
    expect_success(ncclRedOpDestroy(op, self.communicator));
    EXPECT_EQ(data.read(), Values{50});
    EXPECT_EQ(ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, op, self.communicator, self.stream),
              ncclInvalidArgument);
  });
}

TEST(Collective, FactorsOnTheDeviceAreReadWhenTheCollectiveRuns) {
  run_ranks(2, [](Rank& self) {
    Floats factor(self.stream, {2}), data(self.stream, {10});
    ncclRedOp_t op;
    expect_success(
        ncclRedOpCreatePreMulSum(&op, factor.data(), ncclFloat32, ncclScalarDevice, self.communicator));
    factor.set({3});
    expect_success(
        ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, op, self.communicator, self.stream));
    EXPECT_EQ(data.read(), Values{60});
  });
}

TEST(Collective, AGroupSendsAndReceivesInAnyOrder) {
  run_ranks(2, [](Rank& self) {
    const int peer = 1 - self.rank;
    Floats input(self.stream, {self.number()}), output(self.stream, unset(1));
    expect_success(ncclGroupStart());
    expect_success(ncclSend(input.data(), 1, ncclFloat32, peer, self.communicator, self.stream));
    expect_success(ncclRecv(output.data(), 1, ncclFloat32, peer, self.communicator, self.stream));
    expect_success(ncclGroupEnd());
    EXPECT_EQ(output.read(), Values{static_cast<float>(peer)});
  });
}

TEST(Collective, AGroupSendsToItsOwnRank) {
  run_ranks(1, [](Rank& self) {
    Floats input(self.stream, {4}), output(self.stream, unset(1));
    expect_success(ncclGroupStart());
    expect_success(ncclRecv(output.data(), 1, ncclFloat32, 0, self.communicator, self.stream));
    expect_success(ncclSend(input.data(), 1, ncclFloat32, 0, self.communicator, self.stream));
    expect_success(ncclGroupEnd());
    EXPECT_EQ(output.read(), Values{4});
  });
}

TEST(Collective, ASendToTheOwnRankNeedsItsReceive) {
  run_ranks(1, [](Rank& self) {
    Floats input(self.stream, {4});
    EXPECT_EQ(ncclSend(input.data(), 1, ncclFloat32, 0, self.communicator, self.stream), ncclInvalidUsage);
  });
}

TEST(Collective, ASendWaitsForItsReceive) {
  run_ranks(2, [](Rank& self) {
    Floats data(self.stream, {self.number()});
    cudaStreamSynchronize(self.stream);
    if (self.rank == 0) {
      expect_success(ncclSend(data.data(), 1, ncclFloat32, 1, self.communicator, self.stream));
      EXPECT_TRUE(stays_busy(self.stream));
      expect_success(ncclCommAbort(self.communicator));
      self.communicator = nullptr;
    }
  });
}

TEST(Collective, MessagesBetweenTwoRanksKeepTheirOrder) {
  run_ranks(2, [](Rank& self) {
    for (int i = 0; i < 5; ++i) {
      Floats data(self.stream, {static_cast<float>(i)});
      if (self.rank == 0) {
        expect_success(ncclSend(data.data(), 1, ncclFloat32, 1, self.communicator, self.stream));
      } else {
        Floats output(self.stream, unset(1));
        expect_success(ncclRecv(output.data(), 1, ncclFloat32, 0, self.communicator, self.stream));
        EXPECT_EQ(output.read(), Values{static_cast<float>(i)});
      }
    }
  });
}

TEST(Collective, AGroupWithARefusedCallIssuesNothing) {
  run_ranks(1, [](Rank& self) {
    Floats data(self.stream, {1}), output(self.stream, unset(1));
    expect_success(ncclGroupStart());
    expect_success(
        ncclAllReduce(data.data(), output.data(), 1, ncclFloat32, ncclSum, self.communicator, self.stream));
    EXPECT_EQ(ncclBcast(data.data(), 1, ncclFloat32, 7, self.communicator, self.stream), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_EQ(output.read(), Values{-1});
  });
}

}  // namespace
}  // namespace simulated_gpu::collective_test
