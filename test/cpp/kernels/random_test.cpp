#include "kernels/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "kernels/cuda/fill_random.h"

namespace funcol::kernels {
namespace {

std::vector<uint32_t> words(const RandomBits& bits) { return {bits.words, bits.words + 4}; }

// Known answers of Random123, by the authors of Philox.
TEST(Random, PhiloxGivesItsKnownAnswers) {
  EXPECT_EQ(words(random_bits({}, 0)),
            (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint64_t kOnes = ~uint64_t{0};
  EXPECT_EQ(words(random_bits({kOnes, kOnes}, kOnes)),
            (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words(random_bits({0x299f31d0a4093822, 0x0370734413198a2e}, 0x85a308d3243f6a88)),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

template <typename T>
std::vector<T> drawn(const RandomNumbers& numbers, int64_t first, int64_t count, uint64_t seed = 1) {
  const auto values = std::make_unique<T[]>(static_cast<size_t>(count));
  fill_random(values.get(), numbers, {.seed = seed, .offset = 2}, first, count);
  return {values.get(), values.get() + count};
}

template <typename T>
void expect_values_by_position(const RandomNumbers& numbers) {
  const auto full = drawn<T>(numbers, 0, 40);
  for (int64_t begin = 0; begin <= 40; ++begin) {
    for (int64_t end = begin; end <= 40; ++end) {
      EXPECT_EQ(drawn<T>(numbers, begin, end - begin),
                std::vector<T>(full.begin() + begin, full.begin() + end));
    }
  }
}

class AllDistributions : public testing::TestWithParam<Distribution> {};

TEST_P(AllDistributions, ValuesDependOnTheirPositionsOnly) {
  const RandomNumbers numbers{.distribution = GetParam(), .numbers = {0.25, 2}, .low = -5, .range = 11};
  if (GetParam() == Distribution::kIntegers) {
    return expect_values_by_position<int64_t>(numbers);
  }
  expect_values_by_position<float>(numbers);
  expect_values_by_position<double>(numbers);
}

INSTANTIATE_TEST_SUITE_P(Random, AllDistributions,
                         testing::Values(Distribution::kUniform, Distribution::kNormal,
                                         Distribution::kLogNormal, Distribution::kCauchy,
                                         Distribution::kExponential, Distribution::kGeometric,
                                         Distribution::kBernoulli, Distribution::kIntegers));

// The body of the CUDA kernel, run on the host.
template <typename T>
void expect_boxes_by_position(const RandomNumbers& numbers, const RandomBox& box) {
  constexpr int64_t kSize = 120;
  const int64_t seed = 5;
  T all[kSize];
  T filled[kSize] = {};
  T expected[kSize] = {};
  fill_random(all, numbers, {.seed = 5, .offset = 0}, 0, kSize);
  const FillRandom<T> fill(filled, numbers, &seed, box);
  for (int64_t i = 0; i < fill.count(); ++i) {
    fill(i);
  }
  for (int64_t i = 0; i < box.dims[0].size; ++i) {
    for (int64_t j = 0; j < box.dims[1].size; ++j) {
      expected[box.local + i * box.dims[0].local_stride + j * box.dims[1].local_stride] =
          all[box.full + i * box.dims[0].full_stride + j * box.dims[1].full_stride];
    }
  }
  for (int64_t i = 0; i < kSize; ++i) {
    EXPECT_EQ(filled[i], expected[i]) << "element " << i;
  }
}

TEST_P(AllDistributions, ABoxHasTheValuesOfItsPositions) {
  const RandomNumbers numbers{.distribution = GetParam(), .numbers = {0.25, 2}, .low = -5, .range = 11};
  for (const RandomBox& box :
       {RandomBox{.local = 2, .full = 7, .num_dims = 1, .dims = {{11, 1, 1}}},
        RandomBox{.local = 0, .full = 3, .num_dims = 2, .dims = {{5, 3, 8}, {3, 1, 1}}},
        RandomBox{.local = 1, .full = 0, .num_dims = 2, .dims = {{3, 4, 40}, {4, 1, 7}}},
        RandomBox{.local = 6, .full = 9}, RandomBox{.num_dims = 1, .dims = {{0, 1, 1}}}}) {
    if (GetParam() == Distribution::kIntegers || GetParam() == Distribution::kBernoulli) {
      expect_boxes_by_position<int64_t>(numbers, box);
      expect_boxes_by_position<bool>(numbers, box);
    }
    expect_boxes_by_position<float>(numbers, box);
    expect_boxes_by_position<double>(numbers, box);
  }
}

TEST(Random, SeedsGiveOtherValues) { EXPECT_NE(drawn<float>({}, 0, 8, 1), drawn<float>({}, 0, 8, 2)); }

TEST(Random, UniformNumbersAreBelowTheUpperBound) {
  const float above = std::nextafter(1.0F, 2.0F);
  for (const float value : drawn<float>({.numbers = {1, above}}, 0, 1000)) {
    EXPECT_EQ(value, 1.0F);
  }
}

TEST(Random, IntegersReachBothEndsOfTheirRange) {
  const RandomNumbers two{.distribution = Distribution::kIntegers, .low = -1, .range = 2};
  const auto values = drawn<int64_t>(two, 0, 64);
  EXPECT_EQ(std::set<int64_t>(values.begin(), values.end()), (std::set<int64_t>{-1, 0}));
}

TEST(Random, ARangeOfZeroStandsForAllIntegers) {
  const RandomNumbers all{
      .distribution = Distribution::kIntegers, .low = std::numeric_limits<int64_t>::min(), .range = 0};
  const auto values = drawn<int64_t>(all, 0, 64);
  EXPECT_LT(*std::ranges::min_element(values), std::numeric_limits<int64_t>::min() / 2);
  EXPECT_GT(*std::ranges::max_element(values), std::numeric_limits<int64_t>::max() / 2);
}

}  // namespace
}  // namespace funcol::kernels
