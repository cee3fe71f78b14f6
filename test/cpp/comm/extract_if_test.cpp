#include "comm/extract_if.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <vector>

namespace funcol::extract_if_test {
namespace {

bool is_odd(const std::unique_ptr<int>& number) { return *number % 2 == 1; }

std::vector<int> numbers_in(const auto& pointers) {
  std::vector<int> numbers;
  for (const auto& pointer : pointers) {
    numbers.push_back(*pointer);
  }
  return numbers;
}

TEST(ExtractIf, MovesMatchesOutAndKeepsBothOrders) {
  std::deque<std::unique_ptr<int>> items;
  for (const int number : {5, 2, 1, 4, 3}) {
    items.push_back(std::make_unique<int>(number));
  }
  const auto extracted = extract_if(items, is_odd);
  EXPECT_EQ(numbers_in(extracted), (std::vector<int>{5, 1, 3}));
  EXPECT_EQ(numbers_in(items), (std::vector<int>{2, 4}));
}

TEST(ExtractIf, MayExtractNothing) {
  std::vector<std::unique_ptr<int>> items;
  items.push_back(std::make_unique<int>(2));
  EXPECT_TRUE(extract_if(items, is_odd).empty());
  EXPECT_EQ(numbers_in(items), std::vector<int>{2});
}

}  // namespace
}  // namespace funcol::extract_if_test
