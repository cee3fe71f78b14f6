// Device memory, and copies to and from it.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "simulated_gpu.h"
#include "simulated_gpu/device.h"

namespace simulated_gpu::memory_test {
namespace {

TEST(Memory, FreshMemoryIsPoison) {
  const Buffer data;
  EXPECT_TRUE(data.holds(-1));
}

TEST(Memory, AddressesAreNotHandedOutTwice) {
  void* first = nullptr;
  void* second = nullptr;
  EXPECT_CUDA(cudaMalloc(&first, kBytes));
  EXPECT_CUDA(cudaFree(first));
  EXPECT_CUDA(cudaMalloc(&second, kBytes));
  EXPECT_NE(first, second);
  EXPECT_CUDA(cudaFree(second));
  EXPECT_EQ(cudaFree(second), cudaErrorInvalidValue);
}

TEST(Memory, ADeviceThatIsFullSaysSo) {
  size_t free_before = 0;
  size_t total = 0;
  EXPECT_CUDA(cudaMemGetInfo(&free_before, &total));
  void* address = nullptr;
  EXPECT_EQ(cudaMalloc(&address, total + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(address, nullptr);
  EXPECT_CUDA(cudaMalloc(&address, 1 << 20));
  size_t free_now = 0;
  EXPECT_CUDA(cudaMemGetInfo(&free_now, &total));
  EXPECT_EQ(free_before - free_now, size_t{1} << 20);
  EXPECT_CUDA(cudaFree(address));
}

TEST(Memory, AnAddressIsKnownByItsKind) {
  cudaPointerAttributes attributes;
  const Buffer device;
  EXPECT_CUDA(cudaPointerGetAttributes(&attributes, device.data() + 3));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(attributes.hostPointer, nullptr);

  void* pinned = nullptr;
  EXPECT_CUDA(cudaMallocHost(&pinned, kBytes));
  EXPECT_CUDA(cudaPointerGetAttributes(&attributes, pinned));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_CUDA(cudaFreeHost(pinned));

  int pageable = 0;
  EXPECT_CUDA(cudaPointerGetAttributes(&attributes, &pageable));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);

  EXPECT_CUDA(cudaHostRegister(&pageable, sizeof pageable, 0));
  EXPECT_CUDA(cudaPointerGetAttributes(&attributes, &pageable));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_CUDA(cudaHostUnregister(&pageable));
  EXPECT_EQ(cudaHostUnregister(&pageable), cudaErrorInvalidValue);
}

TEST(Memory, AFreeWaitsForTheDevice) {
  const OwnStream stream;
  const Buffer sum(0);
  auto* const term = new Buffer(4);
  EXPECT_CUDA(add(stream, sum, *term, 1));
  delete term;
  EXPECT_TRUE(sum.holds(5));
}

// The copy transfers the values that a pageable source has when the call returns.
TEST(Copies, PageableMemoryIsReadBeforeAnAsynchronousCopyReturns) {
  const OwnStream stream;
  const Buffer data;
  std::vector<int> source(kCount, 3);
  EXPECT_CUDA(cudaMemcpyAsync(data.data(), source.data(), kBytes, cudaMemcpyHostToDevice, stream));
  std::fill(source.begin(), source.end(), 9);
  EXPECT_TRUE(data.holds(3));
}

// The copy transfers the values that a pinned source has when the stream reaches the copy.
TEST(Copies, PinnedMemoryIsReadWhenTheStreamReachesTheCopy) {
  const OwnStream stream;
  const Buffer data;
  std::atomic<bool> released = false;
  hold(stream, released);
  int* pinned = nullptr;
  EXPECT_CUDA(cudaMallocHost(reinterpret_cast<void**>(&pinned), kBytes));
  std::fill_n(pinned, kCount, 3);
  EXPECT_CUDA(cudaMemcpyAsync(data.data(), pinned, kBytes, cudaMemcpyHostToDevice, stream));
  std::fill_n(pinned, kCount, 9);
  released = true;
  EXPECT_TRUE(data.holds(9));
  EXPECT_NE(std::string(simulated_gpu_take_reports()).find("race: pinned memory was written"),
            std::string::npos);
  EXPECT_CUDA(cudaFreeHost(pinned));
}

TEST(Copies, ACopyToPageableMemoryReturnsOnceItIsDone) {
  const OwnStream stream;
  const Buffer data(0);
  EXPECT_CUDA(add(stream, data, data, 6));
  std::vector<int> values(kCount);
  EXPECT_CUDA(cudaMemcpyAsync(values.data(), data.data(), kBytes, cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(values, std::vector<int>(kCount, 6));
}

TEST(Copies, RowsKeepTheirPitches) {
  const Buffer data(0);
  const std::vector<int> source{1, 2, 3, 4, 5, 6};
  EXPECT_CUDA(cudaMemcpy2DAsync(data.data(), 4 * sizeof(int), source.data(), 3 * sizeof(int), 2 * sizeof(int),
                                2, cudaMemcpyHostToDevice, nullptr));
  const auto values = data.values();
  EXPECT_EQ(std::vector<int>(values.begin(), values.begin() + 8), (std::vector<int>{1, 2, 0, 0, 4, 5, 0, 0}));
}

TEST(Copies, BytesMoveBetweenDevices) {
  const Buffer here(8);
  EXPECT_CUDA(cudaSetDevice(1));
  const Buffer there;
  EXPECT_CUDA(cudaMemcpyPeerAsync(there.data(), 1, here.data(), 0, kBytes, nullptr));
  EXPECT_TRUE(there.holds(8));
  EXPECT_CUDA(cudaSetDevice(0));
}

}  // namespace
}  // namespace simulated_gpu::memory_test
