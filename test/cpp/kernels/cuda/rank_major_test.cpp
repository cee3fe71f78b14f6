#include "kernels/rank_major.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cuda/needs_cuda.h"
#include "kernels/cuda_library.h"
#include "kernels/rank_major_cases.h"

namespace funcol::kernels::cuda_rank_major_test {
namespace {

using CpuKernel = void (*)(const void*, void*, const ShardShape&, int64_t, int64_t);
using CudaKernel = const char* (*)(const void*, void*, const ShardShape&, void*);

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t size) {
    if (cudaMalloc(&data_, size) != cudaSuccess) {
      data_ = nullptr;
    }
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
};

Bytes on_cpu(CpuKernel kernel, const Bytes& in, const ShardShape& shape) {
  Bytes out(in.size());
  kernel(in.data(), out.data(), shape, 0, shape.num_rows());
  return out;
}

class LayoutCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    needs_cuda();
    if (!IsSkipped() && !HasFatalFailure()) {
      ASSERT_STREQ(text_of(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)), nullptr);
    }
  }

  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
  }

  // The kernel's output equals that of the CPU kernel, and the memory around it is untouched. Input and
  // output start at the offsets from an aligned address. All work is on one stream that no other waits for.
  void expect_equals_cpu(CudaKernel kernel, CpuKernel cpu_kernel, const ShardShape& shape,
                         size_t in_offset = 0, size_t out_offset = 0) {
    const Bytes in = numbered_bytes(shape.num_bytes());
    const DeviceMemory source(in_offset + in.size() + kMargin);
    const DeviceMemory target(out_offset + in.size() + kMargin);
    ASSERT_NE(source.data(), nullptr);
    ASSERT_NE(target.data(), nullptr);
    Bytes result(out_offset + in.size() + kMargin);
    ASSERT_STREQ(
        text_of(cudaMemcpyAsync(source.data() + in_offset, in.data(), in.size(), cudaMemcpyDefault, stream_)),
        nullptr);
    ASSERT_STREQ(text_of(cudaMemsetAsync(target.data(), kGuard, result.size(), stream_)), nullptr);
    ASSERT_STREQ(kernel(source.data() + in_offset, target.data() + out_offset, shape, stream_), nullptr);
    ASSERT_STREQ(
        text_of(cudaMemcpyAsync(result.data(), target.data(), result.size(), cudaMemcpyDefault, stream_)),
        nullptr);
    ASSERT_STREQ(text_of(cudaStreamSynchronize(stream_)), nullptr);

    Bytes expected(out_offset, kGuard);
    const Bytes out = on_cpu(cpu_kernel, in, shape);
    expected.insert(expected.end(), out.begin(), out.end());
    expected.insert(expected.end(), kMargin, kGuard);
    EXPECT_TRUE(result == expected);
  }

  cudaStream_t stream_ = nullptr;
};

class LayoutCudaOfAnyShape : public LayoutCuda, public ::testing::WithParamInterface<Sizes> {
 protected:
  const ShardShape shape_ = shape_of(GetParam());
};

TEST_P(LayoutCudaOfAnyShape, MergeEqualsTheCpuKernel) {
  expect_equals_cpu(cuda_library().functions->merge_shards, merge_shards, shape_);
}

TEST_P(LayoutCudaOfAnyShape, SplitEqualsTheCpuKernel) {
  expect_equals_cpu(cuda_library().functions->split_shards, split_shards, shape_);
}

INSTANTIATE_TEST_SUITE_P(Sizes, LayoutCudaOfAnyShape,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3, 4, 5, 8, 12, 16, 20, 32, 100, 4096),
                                            ::testing::Values(1, 2, 3, 8), ::testing::Values(0, 1, 2, 7, 64)),
                         name_of_sizes);

class LayoutCudaOfUnalignedMemory : public LayoutCuda, public ::testing::WithParamInterface<Offsets> {
 protected:
  const size_t in_offset_ = static_cast<size_t>(std::get<0>(GetParam()));
  const size_t out_offset_ = static_cast<size_t>(std::get<1>(GetParam()));
  const ShardShape shape_ = {.num_ranks = 3, .outer = 7, .row_bytes = std::get<2>(GetParam())};
};

TEST_P(LayoutCudaOfUnalignedMemory, MergeEqualsTheCpuKernel) {
  expect_equals_cpu(cuda_library().functions->merge_shards, merge_shards, shape_, in_offset_, out_offset_);
}

TEST_P(LayoutCudaOfUnalignedMemory, SplitEqualsTheCpuKernel) {
  expect_equals_cpu(cuda_library().functions->split_shards, split_shards, shape_, in_offset_, out_offset_);
}

INSTANTIATE_TEST_SUITE_P(Offsets, LayoutCudaOfUnalignedMemory,
                         ::testing::Combine(::testing::Values(0, 1, 2, 4, 8),
                                            ::testing::Values(0, 1, 2, 4, 8),
                                            ::testing::Values(1, 2, 4, 8, 16, 48)),
                         name_of_offsets);

// Each thread of the grid then moves several vectors.
constexpr ShardShape kManyVectors = {.num_ranks = 3, .outer = 1'000'003, .row_bytes = 3};

TEST_F(LayoutCuda, MergeOfMoreVectorsThanThreadsEqualsTheCpuKernel) {
  expect_equals_cpu(cuda_library().functions->merge_shards, merge_shards, kManyVectors);
}

TEST_F(LayoutCuda, SplitOfMoreVectorsThanThreadsEqualsTheCpuKernel) {
  expect_equals_cpu(cuda_library().functions->split_shards, split_shards, kManyVectors);
}

// More bytes than 32-bit indexes can count. Rank 0 is all 1; rank 1 is all 2 and ends with 3.
TEST_F(LayoutCuda, MergeOfMoreThanTwoGibibytesIsRight) {
  const ShardShape shape = {.num_ranks = 2, .outer = (int64_t{1} << 30) + 1, .row_bytes = 1};
  const auto size = static_cast<size_t>(shape.num_bytes());
  const auto half = static_cast<size_t>(shape.outer);
  size_t num_free = 0;
  size_t num_total = 0;
  ASSERT_STREQ(text_of(cudaMemGetInfo(&num_free, &num_total)), nullptr);
  if (num_free < 3 * size) {
    GTEST_SKIP() << "too little device memory is free";
  }
  const DeviceMemory in(size);
  const DeviceMemory out(size);
  ASSERT_NE(in.data(), nullptr);
  ASSERT_NE(out.data(), nullptr);
  ASSERT_STREQ(text_of(cudaMemsetAsync(in.data(), 1, half, stream_)), nullptr);
  ASSERT_STREQ(text_of(cudaMemsetAsync(in.data() + half, 2, half, stream_)), nullptr);
  ASSERT_STREQ(text_of(cudaMemsetAsync(in.data() + size - 1, 3, 1, stream_)), nullptr);
  ASSERT_STREQ(cuda_library().functions->merge_shards(in.data(), out.data(), shape, stream_), nullptr);
  Bytes last(6);
  ASSERT_STREQ(text_of(cudaMemcpyAsync(last.data(), out.data() + size - 6, 6, cudaMemcpyDefault, stream_)),
               nullptr);
  ASSERT_STREQ(text_of(cudaStreamSynchronize(stream_)), nullptr);
  EXPECT_EQ(last, (Bytes{1, 2, 1, 2, 1, 3}));
}

TEST_F(LayoutCuda, AnEmptyTensorMayHaveNoMemory) {
  EXPECT_STREQ(cuda_library().functions->merge_shards(nullptr, nullptr,
                                                      {.num_ranks = 4, .outer = 0, .row_bytes = 8}, stream_),
               nullptr);
  EXPECT_STREQ(cuda_library().functions->split_shards(nullptr, nullptr,
                                                      {.num_ranks = 4, .outer = 3, .row_bytes = 0}, stream_),
               nullptr);
}

TEST_F(LayoutCuda, AnErrorIsReturnedOnceAsText) {
  const ShardShape one_copy = {.num_ranks = 1, .outer = 1, .row_bytes = 16};
  EXPECT_STREQ(cuda_library().functions->merge_shards(nullptr, nullptr, one_copy, stream_),
               cudaGetErrorString(cudaErrorInvalidValue));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Code that shares the runtime may leave an error behind.
TEST_F(LayoutCuda, AnErrorThatOtherCodeLeftIsNotTakenForTheKernels) {
  const ShardShape shape = {.num_ranks = 2, .outer = 2, .row_bytes = 4};
  const DeviceMemory in(static_cast<size_t>(shape.num_bytes()));
  const DeviceMemory out(static_cast<size_t>(shape.num_bytes()));
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  EXPECT_STREQ(cuda_library().functions->merge_shards(in.data(), out.data(), shape, stream_), nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST(LayoutCudaBuild, HasCudaKernels) {
  EXPECT_NE(cuda_library().functions, nullptr);
  EXPECT_STREQ(why_no_cuda_kernels(), nullptr);
}

}  // namespace
}  // namespace funcol::kernels::cuda_rank_major_test
