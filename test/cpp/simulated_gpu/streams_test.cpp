// Order of operations within a stream, across streams, and on the default stream.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "simulated_gpu/device.h"

namespace simulated_gpu::streams_test {
namespace {

// The names of operations in the order in which they ran.
class Journal {
 public:
  void note(cudaStream_t stream, const std::string& name) {
    EXPECT_CUDA(enqueue(stream, {name, at_once([this, name] { add(name); })}));
  }
  std::vector<std::string> names() {
    EXPECT_CUDA(cudaDeviceSynchronize());
    const std::lock_guard<std::mutex> lock(mutex_);
    return names_;
  }

 private:
  void add(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    names_.push_back(name);
  }

  std::mutex mutex_;
  std::vector<std::string> names_;
};

using Names = std::vector<std::string>;

TEST(Streams, AStreamRunsItsWorkInTheOrderOfIssue) {
  const OwnStream stream;
  Journal journal;
  Names want;
  for (int i = 0; i < 50; ++i) {
    want.push_back(std::to_string(i));
    journal.note(stream, want.back());
  }
  EXPECT_EQ(journal.names(), want);
}

TEST(Streams, WorkIsAsynchronous) {
  const OwnStream stream;
  std::atomic<bool> released = false;
  hold(stream, released);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  released = true;
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_CUDA(cudaStreamQuery(stream));
}

TEST(Streams, AStreamThatWaitsDoesNotHoldUpOthers) {
  const OwnStream held;
  const OwnStream free;
  Journal journal;
  std::atomic<bool> released = false;
  hold(held, released);
  journal.note(free, "free");
  EXPECT_CUDA(cudaStreamSynchronize(free));
  released = true;
  EXPECT_EQ(journal.names(), Names{"free"});
}

TEST(Streams, AnEventOrdersWhatComesAfterItsWaitBehindWhatCameBeforeItsRecord) {
  for (int round = 0; round < 20; ++round) {
    const OwnStream first;
    const OwnStream second;
    Journal journal;
    journal.note(first, "before");
    wait_for(second, first);
    journal.note(second, "after");
    EXPECT_EQ(journal.names(), (Names{"before", "after"}));
  }
}

TEST(Streams, AWaitForAnEventThatWasNeverRecordedIsNone) {
  const OwnStream stream;
  const OwnEvent event;
  EXPECT_CUDA(cudaStreamWaitEvent(stream, event, 0));
  EXPECT_CUDA(cudaEventQuery(event));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
}

TEST(Streams, AWaitIsForTheLastRecordBeforeIt) {
  const OwnStream stream;
  const OwnStream other;
  const OwnEvent event;
  std::atomic<bool> released = false;
  EXPECT_CUDA(cudaEventRecord(event, stream));
  EXPECT_CUDA(cudaStreamWaitEvent(other, event, 0));
  hold(stream, released);
  EXPECT_CUDA(cudaEventRecord(event, stream));  // too late for the wait
  EXPECT_CUDA(cudaStreamSynchronize(other));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  released = true;
  EXPECT_CUDA(cudaEventSynchronize(event));
}

TEST(Streams, BlockingStreamsWaitForTheDefaultStreamAndItForThem) {
  const OwnStream blocking(cudaStreamDefault);
  for (int round = 0; round < 20; ++round) {
    Journal journal;
    journal.note(blocking, "one");
    journal.note(nullptr, "two");
    journal.note(blocking, "three");
    EXPECT_EQ(journal.names(), (Names{"one", "two", "three"}));
  }
}

TEST(Streams, NonBlockingStreamsDoNotWaitForTheDefaultStream) {
  const OwnStream stream(cudaStreamNonBlocking);
  Journal journal;
  std::atomic<bool> released = false;
  hold(nullptr, released);
  journal.note(stream, "free");
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  released = true;
  EXPECT_EQ(journal.names(), Names{"free"});
}

TEST(Streams, DevicesHaveDefaultStreamsOfTheirOwn) {
  Journal journal;
  std::atomic<bool> released = false;
  hold(nullptr, released);
  EXPECT_CUDA(cudaSetDevice(1));
  journal.note(nullptr, "other device");
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_CUDA(cudaSetDevice(0));
  released = true;
  EXPECT_EQ(journal.names(), Names{"other device"});
}

TEST(Streams, AHostFunctionRunsInOrderAndMayNotCallCuda) {
  const OwnStream stream;
  Journal journal;
  struct Call {
    Journal* journal;
    cudaError_t result;
  } call{&journal, cudaSuccess};
  journal.note(stream, "before");
  const auto function = [](void* data) { static_cast<Call*>(data)->result = cudaStreamSynchronize(nullptr); };
  std::atomic<bool> released = false;
  hold(nullptr, released);  // so that there would be something to wait for
  EXPECT_CUDA(cudaLaunchHostFunc(stream, function, &call));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(call.result, cudaErrorNotPermitted);
  released = true;
  EXPECT_EQ(journal.names(), Names{"before"});
}

TEST(Streams, WorkOfOneChainRunsInTheOrderOfIssueOnAnyStreams) {
  const int chain = 0;
  for (int round = 0; round < 20; ++round) {
    const OwnStream streams[3];
    std::vector<int> ran;
    for (int i = 0; i < 9; ++i) {
      Work work{"link", at_once([&ran, i] { ran.push_back(i); })};
      work.chain = &chain;
      EXPECT_CUDA(enqueue(streams[(i * 2) % 3], std::move(work)));
    }
    EXPECT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(ran, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  }
}

TEST(Streams, ADestroyedStreamFinishesItsWork) {
  Journal journal;
  {
    const OwnStream stream;
    journal.note(stream, "last");
  }
  const OwnStream other;
  while (journal.names().empty()) {
    EXPECT_CUDA(cudaStreamSynchronize(other));
  }
  EXPECT_EQ(journal.names(), Names{"last"});
}

TEST(Streams, AnUnknownHandleIsRefused) {
  int nothing = 0;
  EXPECT_EQ(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(&nothing)), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(Events, TheTimeBetweenTwoEventsIsThatOfTheStream) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  EXPECT_CUDA(cudaEventCreate(&begin));
  EXPECT_CUDA(cudaEventCreate(&end));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  EXPECT_CUDA(cudaEventRecord(begin, nullptr));
  EXPECT_CUDA(cudaEventRecord(end, nullptr));
  EXPECT_CUDA(cudaEventSynchronize(end));
  EXPECT_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT_GE(milliseconds, 0);
  EXPECT_CUDA(cudaEventDestroy(begin));
  EXPECT_CUDA(cudaEventDestroy(end));
}

}  // namespace
}  // namespace simulated_gpu::streams_test
