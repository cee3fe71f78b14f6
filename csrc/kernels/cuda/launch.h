// Launches of kernels whose threads share the indexes [0, body.count()).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/functions.h"

namespace funcol::kernels::cuda {

constexpr int kThreads = 256;

// Calls `body` with each index. Neighboring threads take neighboring indexes.
template <typename Body>
__global__ void __launch_bounds__(kThreads) run(const Body body) {
  using Index = typename Body::Index;
  const Index step = Index{gridDim.x} * kThreads;
  for (Index i = Index{blockIdx.x} * kThreads + threadIdx.x; i < body.count(); i += step) {
    body(i);
  }
}

// Returns null, or the text of the error.
template <typename Body>
const char* launch(Body body, cudaStream_t stream) {
  int device = 0;
  int num_multiprocessors = 0;
  if (const char* error = error_text(cudaGetDevice(&device))) {
    return error;
  }
  if (const char* error =
          error_text(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device))) {
    return error;
  }
  constexpr int64_t kBlocksPerMultiprocessor = 2048 / kThreads;
  const auto count = static_cast<int64_t>(body.count());
  const int64_t num_blocks =
      std::min((count + kThreads - 1) / kThreads, kBlocksPerMultiprocessor * num_multiprocessors);
  void* arguments[] = {&body};
  return error_text(cudaLaunchKernel(reinterpret_cast<const void*>(&run<Body>),
                                     dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads), arguments, 0,
                                     stream));
}

// Calls `launch_as(vector)` with a value of the type of vectors of `num_bytes`: 16, 8, 4, 2 or 1.
template <typename LaunchAs>
const char* launch_in_vectors(int64_t num_bytes, const LaunchAs& launch_as) {
  switch (num_bytes) {
    case 16:
      return launch_as(uint4{});
    case 8:
      return launch_as(uint2{});
    case 4:
      return launch_as(uint32_t{});
    case 2:
      return launch_as(uint16_t{});
    default:
      return launch_as(uint8_t{});
  }
}

}  // namespace funcol::kernels::cuda
