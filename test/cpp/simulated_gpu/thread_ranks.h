// Ranks of NCCL that are threads of this process, for tests that call the functions of NCCL and CUDA alone.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu {
using Values = std::vector<float>;

// Returns the initial values of a buffer.
inline Values unset(size_t size) { return Values(size, -1); }

// Device memory that is filled and read in the order of a stream.
class Floats {
 public:
  Floats(cudaStream_t stream, const Values& values) : stream_(stream), size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(size_, 1) * sizeof(float)), cudaSuccess);
    set(values);
  }
  ~Floats() {
    cudaStreamSynchronize(stream_);
    cudaFree(data_);
  }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;

  float* data() const { return static_cast<float*>(data_); }

  void set(const Values& values) {
    EXPECT_EQ(cudaMemcpyAsync(data_, values.data(), size_ * sizeof(float), cudaMemcpyHostToDevice, stream_),
              cudaSuccess);
  }

  Values read() const {
    Values values(size_);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), data_, size_ * sizeof(float), cudaMemcpyDeviceToHost, stream_),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return values;
  }

 private:
  cudaStream_t stream_;
  size_t size_;
  void* data_ = nullptr;
};

struct Rank {
  int rank, num_ranks;
  ncclComm_t communicator;
  cudaStream_t stream;

  float number() const { return static_cast<float>(rank); }
};

inline void expect_success(ncclResult_t result) {
  EXPECT_EQ(result, ncclSuccess) << ncclGetLastError(nullptr);
}

// Runs `body` on every rank of a communicator; destroys the communicator unless `body` aborted it and set it
// to null.
inline void run_ranks(int num_ranks, const std::function<void(Rank&)>& body) {
  ncclUniqueId id;
  expect_success(ncclGetUniqueId(&id));
  int num_devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&num_devices), cudaSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([=] {
      cudaSetDevice(rank % num_devices);
      Rank self{rank, num_ranks, nullptr, nullptr};
      ASSERT_EQ(cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking), cudaSuccess);
      expect_success(ncclCommInitRank(&self.communicator, num_ranks, id, rank));
      body(self);
      EXPECT_EQ(cudaStreamSynchronize(self.stream), cudaSuccess);
      if (self.communicator) expect_success(ncclCommDestroy(self.communicator));
      cudaStreamDestroy(self.stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline bool is_poison(const Values& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

inline ncclResult_t error_of(ncclComm_t communicator) {
  ncclResult_t error = ncclSuccess;
  expect_success(ncclCommGetAsyncError(communicator, &error));
  return error;
}

// Returns true if the stream is still busy after a while in which it could have finished.
inline bool stays_busy(cudaStream_t stream) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (std::chrono::steady_clock::now() < end) {
    if (cudaStreamQuery(stream) != cudaErrorNotReady) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace simulated_gpu
