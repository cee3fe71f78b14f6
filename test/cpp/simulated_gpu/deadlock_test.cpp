// Communicators that wait for each other for ever are found, and those that are late only never are.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "simulated_gpu.h"
#include "simulated_gpu/device.h"
#include "simulated_gpu/thread_ranks.h"

namespace simulated_gpu::deadlock_test {
namespace {

// Longer than the scheduler takes to call it a stall.
constexpr std::chrono::milliseconds kLate{1200};

// A rank with one communicator for each of several sets of ranks; null where it does not belong.
struct Member {
  int rank;
  std::vector<ncclComm_t> communicators;

  void reduce(size_t communicator, const Floats& data, cudaStream_t stream) const {
    expect_success(ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, ncclSum,
                                 communicators[communicator], stream));
  }
  ncclResult_t error() const {
    for (ncclComm_t communicator : communicators) {
      if (communicator && error_of(communicator) != ncclSuccess) return error_of(communicator);
    }
    return ncclSuccess;
  }
};

// Runs `body` on each of `num_ranks` ranks, with a communicator for each of `sets`. Returns the reports.
std::string reports_of(int num_ranks, const std::vector<std::vector<int>>& sets,
                       const std::function<void(const Member&)>& body) {
  simulated_gpu_take_reports();
  std::vector<ncclUniqueId> ids(sets.size());
  for (ncclUniqueId& id : ids) expect_success(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Member self{rank, std::vector<ncclComm_t>(sets.size())};
      for (size_t i = 0; i < sets.size(); ++i) {
        const auto at = std::ranges::find(sets[i], rank);
        if (at == sets[i].end()) continue;
        expect_success(ncclCommInitRank(&self.communicators[i], static_cast<int>(sets[i].size()), ids[i],
                                        static_cast<int>(at - sets[i].begin())));
      }
      body(self);
      for (ncclComm_t communicator : self.communicators) {
        if (communicator) expect_success(ncclCommDestroy(communicator));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return simulated_gpu_take_reports();
}

void expect_deadlock(const std::string& reports) {
  EXPECT_NE(reports.find("nothing can run: communicators wait for each other"), std::string::npos) << reports;
  EXPECT_NE(reports.find("runs nccl all_reduce and waits for rank"), std::string::npos) << reports;
  EXPECT_NE(reports.find("has nccl all_reduce queued behind communicator"), std::string::npos) << reports;
}

TEST(Deadlock, TwoOrdersOnOneStreamAreReported) {
  expect_deadlock(reports_of(2, {{0, 1}, {0, 1}}, [](const Member& self) {
    const OwnStream stream;
    Floats data(stream, {1});
    self.reduce(self.rank == 0 ? 0 : 1, data, stream);
    self.reduce(self.rank == 0 ? 1 : 0, data, stream);
    EXPECT_TRUE(is_poison(data.read()));
    EXPECT_NE(self.error(), ncclSuccess);
  }));
}

TEST(Deadlock, TwoOrdersOnStreamsThatWaitForEachOtherAreReported) {
  expect_deadlock(reports_of(2, {{0, 1}, {0, 1}}, [](const Member& self) {
    const OwnStream first, second;
    Floats data(first, {1});
    self.reduce(self.rank == 0 ? 0 : 1, data, first);
    wait_for(second, first);
    self.reduce(self.rank == 0 ? 1 : 0, data, second);
    wait_for(first, second);
    EXPECT_TRUE(is_poison(data.read()));
  }));
}

TEST(Deadlock, ACircleOfThreeRanksIsReported) {
  expect_deadlock(reports_of(3, {{0, 1}, {1, 2}, {2, 0}}, [](const Member& self) {
    const OwnStream stream;
    Floats data(stream, {1});
    const auto rank = static_cast<size_t>(self.rank);
    self.reduce(rank, data, stream);
    self.reduce((rank + 2) % 3, data, stream);
    EXPECT_TRUE(is_poison(data.read()));
  }));
}

TEST(Deadlock, ASendBehindTheOtherRanksReceiveIsReported) {
  const auto reports = reports_of(2, {{0, 1}, {0, 1}}, [](const Member& self) {
    const OwnStream stream;
    Floats data(stream, {1});
    const auto mine = static_cast<size_t>(self.rank), other = 1 - mine;
    expect_success(ncclSend(data.data(), 1, ncclFloat32, 1 - self.rank, self.communicators[mine], stream));
    expect_success(ncclRecv(data.data(), 1, ncclFloat32, 1 - self.rank, self.communicators[other], stream));
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  });
  EXPECT_NE(reports.find("nothing can run"), std::string::npos) << reports;
}

TEST(Deadlock, ARankThatComesLateIsNone) {
  EXPECT_EQ(reports_of(2, {{0, 1}, {0, 1}},
                       [](const Member& self) {
                         const OwnStream stream;
                         Floats data(stream, {1});
                         if (self.rank == 1) std::this_thread::sleep_for(kLate);
                         self.reduce(0, data, stream);
                         self.reduce(1, data, stream);
                         EXPECT_EQ(data.read(), Values{4});
                       }),
            "");
}

TEST(Deadlock, ACallThatIsQueuedBehindLateWorkIsNone) {
  std::atomic<bool> released{false};
  EXPECT_EQ(reports_of(2, {{0, 1}, {0, 1}},
                       [&](const Member& self) {
                         const OwnStream stream;
                         Floats data(stream, {1});
                         if (self.rank == 1) hold(stream, released);
                         self.reduce(0, data, stream);
                         self.reduce(1, data, stream);
                         if (self.rank == 0) {
                           std::this_thread::sleep_for(kLate);
                           released = true;
                         }
                         EXPECT_EQ(data.read(), Values{4});
                       }),
            "");
}

TEST(Deadlock, TwoOrdersOnStreamsThatNothingOrdersFinish) {
  EXPECT_EQ(reports_of(2, {{0, 1}, {0, 1}},
                       [](const Member& self) {
                         const OwnStream first, second;
                         Floats one(first, {1}), other(second, {2});
                         if (self.rank == 0) {
                           self.reduce(0, one, first);
                           self.reduce(1, other, second);
                         } else {
                           self.reduce(1, other, second);
                           self.reduce(0, one, first);
                         }
                         EXPECT_EQ(one.read(), Values{2});
                         EXPECT_EQ(other.read(), Values{4});
                       }),
            "");
}

}  // namespace
}  // namespace simulated_gpu::deadlock_test
