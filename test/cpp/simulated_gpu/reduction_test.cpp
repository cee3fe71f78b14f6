#include "nccl/reduction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace simulated_gpu::nccl::reduction_test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The reduction of ranks that each have `count` equal values; the last value of the result.
template <typename T>
T reduce_values(std::vector<T> of_ranks, ncclDataType_t type, ncclRedOp_t op, size_t count = 1) {
  std::vector<std::vector<T>> inputs;
  for (const T& value : of_ranks) inputs.emplace_back(count, value);
  std::vector<const void*> parts;
  for (const auto& input : inputs) parts.push_back(input.data());
  std::vector<T> output(count);
  reduce(parts, output.data(), count, type, op);
  return output.back();
}

template <typename T>
T multiply_value(T value, T factor, ncclDataType_t type) {
  multiply(&value, 1, type, &factor);
  return value;
}

TEST(Reduction, BuiltInOpsOfFloats) {
  const std::vector<float> values = {2, 5, 3};
  EXPECT_EQ(reduce_values(values, ncclFloat32, ncclSum), 10);
  EXPECT_EQ(reduce_values(values, ncclFloat32, ncclProd), 30);
  EXPECT_EQ(reduce_values(values, ncclFloat32, ncclMax), 5);
  EXPECT_EQ(reduce_values(values, ncclFloat32, ncclMin), 2);
  EXPECT_FLOAT_EQ(reduce_values(values, ncclFloat32, ncclAvg), 10.0f / 3);
}

TEST(Reduction, OneRankKeepsItsValue) {
  for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
    EXPECT_EQ(reduce_values<double>({-1.25}, ncclFloat64, op), -1.25) << name_of(op);
  }
}

TEST(Reduction, NoValuesAreNoWork) {
  EXPECT_NO_THROW(reduce({nullptr, nullptr}, nullptr, 0, ncclFloat32, ncclSum));
}

class Counts : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Reduction, Counts, ::testing::Values(1, 2, 1023, 1024, 1025, 5000));

TEST_P(Counts, TheLastValueIsReduced) {
  EXPECT_EQ(reduce_values<int32_t>({1, 2, 4}, ncclInt32, ncclSum, GetParam()), 7);
}

TEST(Reduction, IntegersKeepAllTheirBits) {
  const int64_t large = (int64_t{1} << 62) + 1;
  EXPECT_EQ(reduce_values<int64_t>({large, 2}, ncclInt64, ncclSum), large + 2);
  EXPECT_EQ(reduce_values<uint64_t>({~uint64_t{0}, 5}, ncclUint64, ncclMax), ~uint64_t{0});
}

TEST(Reduction, SmallIntegersWrapAround) {
  EXPECT_EQ(reduce_values<uint8_t>({200, 100}, ncclUint8, ncclSum), 44);
  EXPECT_EQ(reduce_values<int8_t>({100, 100}, ncclInt8, ncclSum), -56);
}

TEST(Reduction, SignsDecideTheOrderOfIntegers) {
  EXPECT_EQ(reduce_values<int8_t>({-1, 1}, ncclInt8, ncclMax), 1);
  EXPECT_EQ(reduce_values<uint32_t>({0xFFFFFFFF, 1}, ncclUint32, ncclMax), 0xFFFFFFFF);
}

TEST(Reduction, AveragesOfIntegersAreRoundedTowardsZero) {
  EXPECT_EQ(reduce_values<int32_t>({3, 4}, ncclInt32, ncclAvg), 3);
  EXPECT_EQ(reduce_values<int32_t>({-3, -4}, ncclInt32, ncclAvg), -3);
}

TEST(Reduction, ABoolIsOneIfAnyIs) { EXPECT_EQ(reduce_values<uint8_t>({0, 1, 1}, ncclUint8, ncclMax), 1); }

TEST(Reduction, HalvesAreSummedInFloat) {
  // In half precision 2048 + 1 is 2048, twice.
  const auto sum =
      reduce_values<__half>({__float2half(2048), __float2half(1), __float2half(1)}, ncclFloat16, ncclSum);
  EXPECT_EQ(__half2float(sum), 2050);
}

TEST(Reduction, BrainFloatsAreSummedInFloat) {
  const auto value = [](float number) { return __float2bfloat16(number); };
  const auto sum = reduce_values<__nv_bfloat16>({value(256), value(1), value(1)}, ncclBfloat16, ncclSum);
  EXPECT_EQ(__bfloat162float(sum), 258);
}

TEST(Reduction, FloatsOfEightBitsAreSummed) {
  EXPECT_EQ(static_cast<float>(reduce_values<__nv_fp8_e4m3>({__nv_fp8_e4m3(1.5f), __nv_fp8_e4m3(2.5f)},
                                                            ncclFloat8e4m3, ncclSum)),
            4);
  EXPECT_EQ(static_cast<float>(reduce_values<__nv_fp8_e5m2>({__nv_fp8_e5m2(1.5f), __nv_fp8_e5m2(2.5f)},
                                                            ncclFloat8e5m2, ncclSum)),
            4);
}

TEST(Reduction, EveryOpKeepsNaN) {
  for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
    EXPECT_TRUE(std::isnan(reduce_values<float>({kNaN, 1}, ncclFloat32, op))) << name_of(op);
    EXPECT_TRUE(std::isnan(reduce_values<float>({1, kNaN}, ncclFloat32, op))) << name_of(op);
    EXPECT_TRUE(std::isnan(reduce_values<float>({1, kNaN, 2}, ncclFloat32, op))) << name_of(op);
  }
}

TEST(Reduction, FactorsMultiplyInEveryType) {
  EXPECT_EQ(multiply_value<float>(3, 0.5f, ncclFloat32), 1.5f);
  EXPECT_EQ(multiply_value<double>(3, 0.1, ncclFloat64), 3 * 0.1);
  EXPECT_EQ(multiply_value<int64_t>(3, int64_t{1} << 60, ncclInt64), 3 * (int64_t{1} << 60));
  EXPECT_EQ(__half2float(multiply_value(__float2half(3), __float2half(0.5f), ncclFloat16)), 1.5f);
  EXPECT_EQ(__bfloat162float(multiply_value(__float2bfloat16(3), __float2bfloat16(0.5f), ncclBfloat16)),
            1.5f);
}

TEST(Reduction, SizesAndNamesOfTypes) {
  const std::vector<size_t> sizes = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  for (int type = 0; type < ncclNumTypes; ++type) {
    EXPECT_EQ(size_of(static_cast<ncclDataType_t>(type)), sizes[static_cast<size_t>(type)]);
  }
  EXPECT_EQ(name_of(ncclBfloat16), "bfloat16");
  EXPECT_EQ(name_of(ncclFloat8e5m2), "float8_e5m2");
}

TEST(Reduction, UnknownTypesAndOpsAreRefused) {
  EXPECT_FALSE(is_known(ncclNumTypes));
  EXPECT_THROW(size_of(ncclNumTypes), std::invalid_argument);
  EXPECT_THROW(reduce_values<float>({1}, ncclFloat32, static_cast<ncclRedOp_t>(5)), std::invalid_argument);
}

}  // namespace
}  // namespace simulated_gpu::nccl::reduction_test
