// How communicators are made, and how they end.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cmath>
#include <string>
#include <thread>

#include "simulated_gpu.h"
#include "simulated_gpu/thread_ranks.h"

namespace simulated_gpu::communicator_test {
namespace {

class Communicators : public ::testing::Test {
 protected:
  void SetUp() override { simulated_gpu_take_reports(); }
};

TEST_F(Communicators, RanksThatDisagreeFailAndAreBothNamed) {
  run_ranks(2, [](Rank& self) {
    Floats data(self.stream, {1, 2});
    const size_t count = self.rank == 0 ? 1 : 2;
    expect_success(
        ncclAllReduce(data.data(), data.data(), count, ncclFloat32, ncclSum, self.communicator, self.stream));
    EXPECT_TRUE(std::isnan(data.read()[0]));
    EXPECT_EQ(error_of(self.communicator), ncclInvalidUsage);
    EXPECT_EQ(ncclBcast(data.data(), 1, ncclFloat32, 0, self.communicator, self.stream), ncclInvalidUsage);
  });
  const std::string reports = simulated_gpu_take_reports();
  EXPECT_NE(reports.find("ranks disagree on a communicator of 2 ranks:\n"
                         "  rank 0 calls all_reduce(count 1, float32, sum)\n"
                         "  rank 1 calls all_reduce(count 2, float32, sum)"),
            std::string::npos)
      << reports;
}

TEST_F(Communicators, AThirdRankLearnsThatTwoDisagree) {
  run_ranks(3, [](Rank& self) {
    Floats data(self.stream, {1});
    const int root = self.rank == 0 ? 0 : 1;
    expect_success(ncclBcast(data.data(), 1, ncclFloat32, root, self.communicator, self.stream));
    EXPECT_TRUE(is_poison(data.read()));
    EXPECT_NE(error_of(self.communicator), ncclSuccess);
  });
  EXPECT_NE(std::string(simulated_gpu_take_reports()).find("broadcast(count 1, float32, root 0)"),
            std::string::npos);
}

TEST_F(Communicators, ASendAndItsReceiveThatDifferAreBothNamed) {
  run_ranks(2, [](Rank& self) {
    Floats data(self.stream, {1, 2, 3});
    if (self.rank == 0) {
      expect_success(ncclSend(data.data(), 3, ncclFloat32, 1, self.communicator, self.stream));
    } else {
      expect_success(ncclRecv(data.data(), 2, ncclFloat32, 0, self.communicator, self.stream));
      const Values values = data.read();
      EXPECT_TRUE(is_poison({values[0], values[1]}));
      EXPECT_EQ(error_of(self.communicator), ncclInvalidUsage);
    }
  });
  const std::string reports = simulated_gpu_take_reports();
  EXPECT_NE(reports.find("  rank 1 calls receive(count 2, float32, from rank 0)\n"
                         "  rank 0 calls send(count 3, float32, to rank 1)"),
            std::string::npos)
      << reports;
}

TEST_F(Communicators, AFailureEndsWhatOtherRanksWaitFor) {
  run_ranks(2, [](Rank& self) {
    Floats data(self.stream, {1, 2, 3});
    if (self.rank == 0) {
      expect_success(ncclSend(data.data(), 3, ncclFloat32, 1, self.communicator, self.stream));
      expect_success(ncclRecv(data.data(), 3, ncclFloat32, 1, self.communicator, self.stream));
      EXPECT_TRUE(is_poison(data.read()));
      EXPECT_EQ(error_of(self.communicator), ncclRemoteError);
    } else {
      expect_success(ncclRecv(data.data(), 2, ncclFloat32, 0, self.communicator, self.stream));
      EXPECT_EQ(cudaStreamSynchronize(self.stream), cudaSuccess);
    }
  });
  simulated_gpu_take_reports();
}

TEST_F(Communicators, WithoutItsPeersACollectiveRunsUntilItIsAborted) {
  run_ranks(2, [](Rank& self) {
    if (self.rank == 1) return;
    Floats data(self.stream, {1}), later(self.stream, {2});
    cudaStreamSynchronize(self.stream);
    expect_success(
        ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, ncclSum, self.communicator, self.stream));
    expect_success(
        ncclAllReduce(later.data(), later.data(), 1, ncclFloat32, ncclSum, self.communicator, self.stream));
    EXPECT_TRUE(stays_busy(self.stream));
    expect_success(ncclCommAbort(self.communicator));
    self.communicator = nullptr;
    EXPECT_TRUE(is_poison(data.read()));
    EXPECT_TRUE(is_poison(later.read()));
  });
}

TEST_F(Communicators, ARevokedCommunicatorTakesNoCalls) {
  run_ranks(1, [](Rank& self) {
    Floats data(self.stream, {1});
    expect_success(ncclCommRevoke(self.communicator, 0));
    EXPECT_EQ(ncclBcast(data.data(), 1, ncclFloat32, 0, self.communicator, self.stream), ncclInvalidUsage);
    EXPECT_EQ(error_of(self.communicator), ncclSuccess);
  });
}

TEST_F(Communicators, ASplitGivesEachColorItsRanksInTheirOrder) {
  run_ranks(3, [](Rank& self) {
    ncclComm_t child = nullptr;
    const int color = self.rank == 1 ? 4 : 2;
    expect_success(ncclCommSplit(self.communicator, color, -self.rank, &child, nullptr));
    int rank = -1, num_ranks = -1;
    expect_success(ncclCommUserRank(child, &rank));
    expect_success(ncclCommCount(child, &num_ranks));
    EXPECT_EQ(num_ranks, self.rank == 1 ? 1 : 2);
    EXPECT_EQ(rank, self.rank == 0 ? 1 : 0);
    Floats data(self.stream, {self.number() + 1});
    expect_success(ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, ncclSum, child, self.stream));
    EXPECT_EQ(data.read(), Values{self.rank == 1 ? 2.0f : 4.0f});
    expect_success(ncclCommDestroy(child));
  });
}

TEST_F(Communicators, ASplitWithoutColorGivesNoCommunicator) {
  run_ranks(2, [](Rank& self) {
    ncclComm_t child = self.communicator;
    const int color = self.rank == 0 ? NCCL_SPLIT_NOCOLOR : 0;
    expect_success(ncclCommSplit(self.communicator, color, 0, &child, nullptr));
    EXPECT_EQ(child == nullptr, self.rank == 0);
    if (child) expect_success(ncclCommDestroy(child));
  });
}

TEST_F(Communicators, AShrunkCommunicatorLacksTheExcludedRanks) {
  run_ranks(3, [](Rank& self) {
    if (self.rank == 1) return;
    ncclComm_t child = nullptr;
    int excluded[] = {1};
    expect_success(ncclCommShrink(self.communicator, excluded, 1, &child, nullptr, NCCL_SHRINK_ABORT));
    Floats data(self.stream, {self.number()}), all(self.stream, unset(2));
    expect_success(ncclAllGather(data.data(), all.data(), 1, ncclFloat32, child, self.stream));
    EXPECT_EQ(all.read(), (Values{0, 2}));
    expect_success(ncclCommDestroy(child));
  });
}

TEST_F(Communicators, OneThreadMakesAllRanksInAGroup) {
  ncclUniqueId id;
  expect_success(ncclGetUniqueId(&id));
  ncclComm_t communicators[2];
  expect_success(ncclGroupStart());
  for (int rank = 0; rank < 2; ++rank) {
    cudaSetDevice(rank);
    expect_success(ncclCommInitRank(&communicators[rank], 2, id, rank));
  }
  expect_success(ncclGroupEnd());
  for (int rank = 0; rank < 2; ++rank) {
    int device = -1;
    expect_success(ncclCommCuDevice(communicators[rank], &device));
    EXPECT_EQ(device, rank);
    expect_success(ncclCommDestroy(communicators[rank]));
  }
  cudaSetDevice(0);
}

TEST_F(Communicators, InitAllMakesACommunicatorADevice) {
  ncclComm_t communicators[2];
  expect_success(ncclCommInitAll(communicators, 2, nullptr));
  for (int rank = 0; rank < 2; ++rank) {
    int found = -1;
    expect_success(ncclCommUserRank(communicators[rank], &found));
    EXPECT_EQ(found, rank);
    expect_success(ncclCommDestroy(communicators[rank]));
  }
}

TEST_F(Communicators, RanksThatDifferOnTheirNumberMakeNoCommunicator) {
  ncclUniqueId id;
  expect_success(ncclGetUniqueId(&id));
  ncclComm_t first = nullptr, second = nullptr;
  std::thread other([&] { EXPECT_EQ(ncclCommInitRank(&second, 2, id, 1), ncclInvalidArgument); });
  EXPECT_EQ(ncclCommInitRank(&first, 3, id, 0), ncclInvalidArgument);
  other.join();
  EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("there are "), std::string::npos);
}

TEST_F(Communicators, AnIdThatNobodyMadeIsRefused) {
  ncclUniqueId id = {};
  ncclComm_t communicator = nullptr;
  EXPECT_EQ(ncclCommInitRank(&communicator, 1, id, 0), ncclInvalidArgument);
}

}  // namespace
}  // namespace simulated_gpu::communicator_test
