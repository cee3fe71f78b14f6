#include "transfer/box_copy.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

namespace funcol::box_copy_test {
namespace {

using Runs = std::vector<std::vector<CopyRun>>;

std::vector<int64_t> numbers(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

std::vector<int64_t> copied(const BoxCopy& copy, const at::Tensor& from, int64_t size) {
  const auto to = at::full({size}, -1, at::kLong);
  copy.run(from, 0, to, 0);
  return numbers(to);
}

TEST(BoxCopy, TakesAColumnBlock) {
  const BoxCopy copy({{{0, 0, 2}}, {{3, 0, 3}}}, {2, 6}, {2, 3});
  EXPECT_EQ(copy.numel(), 6);
  EXPECT_EQ(copied(copy, at::arange(12, at::kLong), 6), (std::vector<int64_t>{3, 4, 5, 9, 10, 11}));
}

TEST(BoxCopy, PutsAColumnBlock) {
  const BoxCopy copy({{{0, 0, 2}}, {{0, 1, 2}}}, {2, 2}, {2, 3});
  EXPECT_EQ(copied(copy, at::arange(4, at::kLong), 6), (std::vector<int64_t>{-1, 0, 1, -1, 2, 3}));
}

TEST(BoxCopy, TakesTheProductOfRuns) {
  const BoxCopy copy({{{0, 0, 1}, {2, 1, 1}}, {{1, 0, 1}, {3, 1, 1}}}, {3, 4}, {2, 2});
  EXPECT_EQ(copied(copy, at::arange(12, at::kLong), 4), (std::vector<int64_t>{1, 3, 9, 11}));
}

TEST(BoxCopy, CutsADimBetweenWholeOnes) {
  const BoxCopy copy({{{0, 0, 2}}, {{1, 0, 1}}, {{0, 0, 2}}}, {2, 3, 2}, {2, 1, 2});
  EXPECT_EQ(copied(copy, at::arange(12, at::kLong), 4), (std::vector<int64_t>{2, 3, 8, 9}));
}

TEST(BoxCopy, BeginsWhereItIsTold) {
  const auto to = at::full({6}, -1, at::kLong);
  BoxCopy({{{0, 0, 2}}}, {2}, {2}).run(at::arange(6, at::kLong), 3, to, 1);
  EXPECT_EQ(numbers(to), (std::vector<int64_t>{-1, 3, 4, -1, -1, -1}));
}

TEST(BoxCopy, OfNothingTouchesNothing) {
  const BoxCopy copy({{{0, 0, 0}}, {{0, 0, 3}}}, {0, 3}, {0, 3});
  EXPECT_EQ(copy.numel(), 0);
  EXPECT_EQ(copied(copy, at::empty({0, 3}, at::kLong), 2), (std::vector<int64_t>{-1, -1}));
}

TEST(BoxCopy, OfATensorWithoutDimsIsItsElement) {
  EXPECT_EQ(copied(BoxCopy({}, {}, {}), at::full({}, 7, at::kLong), 1), (std::vector<int64_t>{7}));
}

TEST(SelectionCopy, PutsPositionsInTheirOrder) {
  const auto copy = selection_copy({{0, {{3, 1}, {0, 2}}}}, {4});
  EXPECT_EQ(copied(copy, at::arange(4, at::kLong), 3), (std::vector<int64_t>{3, 0, 1}));
}

}  // namespace
}  // namespace funcol::box_copy_test
