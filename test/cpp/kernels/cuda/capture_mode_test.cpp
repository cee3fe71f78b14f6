#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "kernels/cuda/needs_cuda.h"
#include "kernels/cuda_library.h"

namespace funcol::kernels::cuda_capture_mode_test {
namespace {

class RelaxedCaptureCuda : public ::testing::Test {
 protected:
  void SetUp() override { needs_cuda(); }

  static cudaStreamCaptureMode mode_of_thread() {
    auto mode = cudaStreamCaptureModeGlobal;
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    auto put_back = mode;
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&put_back), cudaSuccess);
    return mode;
  }
};

TEST_F(RelaxedCaptureCuda, TheModeOfTheThreadIsRelaxedUntilTheGuardEnds) {
  const auto before = mode_of_thread();
  {
    const RelaxedCapture relaxed;
    EXPECT_EQ(mode_of_thread(), cudaStreamCaptureModeRelaxed);
  }
  EXPECT_EQ(mode_of_thread(), before);
}

TEST_F(RelaxedCaptureCuda, AnEventMayBeQueriedWhileTheThreadCaptures) {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  {
    const RelaxedCapture relaxed;
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  }
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace funcol::kernels::cuda_capture_mode_test
