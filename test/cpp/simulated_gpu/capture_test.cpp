// Stream captures and the graphs that they make.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "simulated_gpu/device.h"

namespace simulated_gpu::capture_test {
namespace {

class Capture : public testing::Test {
 protected:
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    EXPECT_CUDA(cudaStreamBeginCapture(stream_, mode));
  }

  cudaError_t end() {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(stream_, &graph);
    if (error == cudaSuccess) {
      EXPECT_CUDA(cudaGraphInstantiate(&executable_, graph, 0));
      EXPECT_CUDA(cudaGraphDestroy(graph));
    }
    return error;
  }

  void replay() { EXPECT_CUDA(cudaGraphLaunch(executable_, stream_)); }

  void TearDown() override {
    if (executable_ != nullptr) {
      EXPECT_CUDA(cudaDeviceSynchronize());
      EXPECT_CUDA(cudaGraphExecDestroy(executable_));
    }
    cudaGetLastError();
  }

  const OwnStream stream_;
  const OwnStream other_;
  Buffer in_{1};
  const Buffer out_{0};

 private:
  cudaGraphExec_t executable_ = nullptr;
};

TEST_F(Capture, RunsNothingUntilTheReplay) {
  begin();
  EXPECT_CUDA(add(stream_, out_, in_, 1));
  EXPECT_CUDA(end());
  EXPECT_TRUE(out_.holds(0));
  replay();
  EXPECT_TRUE(out_.holds(2));
}

TEST_F(Capture, EachReplaySeesTheInputsOfItsTime) {
  begin();
  EXPECT_CUDA(add(stream_, out_, in_, 1));
  EXPECT_CUDA(end());
  for (int value = 5; value < 8; ++value) {
    in_.fill(value);
    replay();
    EXPECT_TRUE(out_.holds(value + 1));
  }
}

TEST_F(Capture, AStreamThatJoinedTakesPart) {
  begin();
  wait_for(other_, stream_);
  EXPECT_CUDA(add(other_, out_, in_, 1));
  wait_for(stream_, other_);
  EXPECT_CUDA(add(stream_, out_, out_, 1));
  EXPECT_CUDA(end());
  EXPECT_FALSE(is_capturing(other_));
  replay();
  EXPECT_TRUE(out_.holds(3));
}

TEST_F(Capture, WorkThatDidNotJoinAgainIsAnError) {
  begin();
  wait_for(other_, stream_);
  EXPECT_CUDA(add(other_, out_, in_, 1));
  EXPECT_EQ(end(), cudaErrorStreamCaptureUnjoined);
}

TEST_F(Capture, WaitsForItselfAreRefused) {
  begin();
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, ADeviceSynchronizeIsRefused) {
  begin();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, PageableCopiesAreRefused) {
  begin();
  std::vector<int> host(kCount);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), in_.data(), kBytes, cudaMemcpyDeviceToHost, stream_),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, EventsFromOutsideAreRefused) {
  const OwnEvent event;
  EXPECT_CUDA(cudaEventRecord(event, other_));
  begin();
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, EventsOfTheCaptureCannotBeAskedFromOutside) {
  const OwnEvent event;
  begin();
  EXPECT_CUDA(cudaEventRecord(event, stream_));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorCapturedEvent);
  EXPECT_CUDA(end());
}

TEST_F(Capture, TheDefaultStreamCannotCapture) {
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
}

TEST_F(Capture, WorkOnTheDefaultStreamBreaksTheCaptureOfABlockingStream) {
  const OwnStream blocking(cudaStreamDefault);
  EXPECT_CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
  EXPECT_EQ(add(nullptr, out_, in_, 1), cudaErrorStreamCaptureImplicit);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, TwoCapturesDoNotMerge) {
  begin();
  EXPECT_CUDA(cudaStreamBeginCapture(other_, cudaStreamCaptureModeGlobal));
  const OwnEvent event;
  EXPECT_CUDA(cudaEventRecord(event, other_));
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event, 0), cudaErrorStreamCaptureMerge);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(other_, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_CUDA(end());
}

TEST_F(Capture, OnlyTheOriginEndsIt) {
  begin();
  wait_for(other_, stream_);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(other_, &graph), cudaErrorStreamCaptureUnmatched);
  EXPECT_CUDA(end());
}

TEST_F(Capture, OnlyItsThreadEndsIt) {
  begin();
  std::thread([this] {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureWrongThread);
  }).join();
  EXPECT_CUDA(end());
}

TEST_F(Capture, InGlobalModeOtherThreadsMayNotWaitEither) {
  begin();
  std::thread([] { EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported); }).join();
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, InThreadLocalModeOtherThreadsMay) {
  begin(cudaStreamCaptureModeThreadLocal);
  std::thread([] { EXPECT_CUDA(cudaDeviceSynchronize()); }).join();
  EXPECT_CUDA(end());
}

TEST_F(Capture, AThreadInRelaxedModeMay) {
  begin();
  auto mode = cudaStreamCaptureModeRelaxed;
  EXPECT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_CUDA(cudaEventQuery(OwnEvent()));
  EXPECT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
  EXPECT_CUDA(end());
}

TEST_F(Capture, MemoryCannotBeAllocatedMeanwhile) {
  begin();
  void* address = nullptr;
  EXPECT_EQ(cudaMalloc(&address, kBytes), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, WorkOfOneChainKeepsItsOrderInTheGraph) {
  const int chain = 0;
  std::vector<int> ran;
  begin();
  wait_for(other_, stream_);
  for (int i = 0; i < 8; ++i) {
    Work work{"link", at_once([&ran, i] { ran.push_back(i); })};
    work.chain = &chain;
    EXPECT_CUDA(enqueue(i % 2 == 0 ? stream_ : other_, std::move(work)));
  }
  wait_for(stream_, other_);
  EXPECT_CUDA(end());
  for (int round = 0; round < 5; ++round) {
    ran.clear();
    replay();
    EXPECT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(ran, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  }
}

TEST_F(Capture, ADestroyedGraphLetsItsObjectsGo) {
  int destroyed = 0;
  begin();
  EXPECT_CUDA(add(stream_, out_, in_, 1));
  cudaStreamCaptureStatus status{};
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaStreamGetCaptureInfo(stream_, &status, nullptr, &graph, nullptr, nullptr, nullptr));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  cudaUserObject_t object = nullptr;
  const auto destroy = [](void* data) { ++*static_cast<int*>(data); };
  EXPECT_CUDA(cudaUserObjectCreate(&object, &destroyed, destroy, 1, cudaUserObjectNoDestructorSync));
  EXPECT_CUDA(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  EXPECT_EQ(destroyed, 0);
  EXPECT_CUDA(end());
  EXPECT_EQ(destroyed, 1);
}

}  // namespace
}  // namespace simulated_gpu::capture_test
