// Buffers of numbers on a simulated device, and work on them, for tests.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu {

constexpr size_t kCount = 64;
constexpr size_t kBytes = kCount * sizeof(int);

#define EXPECT_CUDA(call) EXPECT_EQ(cudaSuccess, (call)) << cudaGetErrorString(cudaPeekAtLastError())

// kCount ints on the current device.
class Buffer {
 public:
  Buffer() { EXPECT_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), kBytes)); }
  explicit Buffer(int value) : Buffer() { fill(value); }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  int* data() const { return data_; }
  Range range() const { return {data_, kBytes}; }

  void fill(int value) {
    const std::vector<int> values(kCount, value);
    EXPECT_CUDA(cudaMemcpy(data_, values.data(), kBytes, cudaMemcpyHostToDevice));
  }

  // After all work of the device.
  std::vector<int> values() const {
    EXPECT_CUDA(cudaDeviceSynchronize());
    std::vector<int> values(kCount);
    EXPECT_CUDA(cudaMemcpy(values.data(), data_, kBytes, cudaMemcpyDeviceToHost));
    return values;
  }
  bool holds(int value) const { return values() == std::vector<int>(kCount, value); }

 private:
  int* data_ = nullptr;
};

class OwnStream {
 public:
  explicit OwnStream(unsigned flags = cudaStreamNonBlocking) {
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, flags));
  }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)

 private:
  cudaStream_t stream_ = nullptr;
};

class OwnEvent {
 public:
  OwnEvent() { EXPECT_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~OwnEvent() { cudaEventDestroy(event_); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;
  operator cudaEvent_t() const { return event_; }  // NOLINT(google-explicit-constructor)

 private:
  cudaEvent_t event_ = nullptr;
};

// to = from + value, as a kernel would do it.
inline cudaError_t add(cudaStream_t stream, const Buffer& to, const Buffer& from, int value) {
  const auto run = [=, out = to.data(), in = from.data()] {
    auto* const sums = static_cast<int*>(host_address(out));
    const auto* const terms = static_cast<const int*>(host_address(in));
    for (size_t i = 0; i < kCount; ++i) {
      sums[i] = terms[i] + value;
    }
  };
  return enqueue(stream, {"add", at_once(run), {from.range()}, {to.range()}});
}

// Holds up what comes later on the stream until `released`, which has to outlive it.
inline void hold(cudaStream_t stream, const std::atomic<bool>& released) {
  EXPECT_CUDA(
      enqueue(stream, {"hold", [&released]() -> Step { return [&released] { return released.load(); }; }}));
}

// `later` waits for what is on `earlier` now.
inline void wait_for(cudaStream_t later, cudaStream_t earlier) {
  const OwnEvent event;
  EXPECT_CUDA(cudaEventRecord(event, earlier));
  EXPECT_CUDA(cudaStreamWaitEvent(later, event, 0));
}

}  // namespace simulated_gpu
