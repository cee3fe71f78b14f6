// Skips a test where there is no GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace funcol::kernels {

// Call it from SetUp. Where a GPU is promised, a test that cannot see it must not pass as skipped.
inline void needs_cuda() {
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaSuccess && num_devices > 0) {
    return;
  }
  cudaGetLastError();
  const std::string reason = error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error);
  if (std::getenv("FUNCOL_REQUIRE_CUDA") != nullptr) {
    FAIL() << "FUNCOL_REQUIRE_CUDA is set, but: " << reason;
  }
  GTEST_SKIP() << reason;
}

}  // namespace funcol::kernels
