#include "transfer/selection.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace funcol::selection_test {
namespace {

TEST(Select, OfOneRunADimIsAView) {
  const auto tensor = at::arange(12).view({3, 4});
  const Selection selection{{0, {{1, 2}}}, {1, {{0, 3}}}};
  EXPECT_TRUE(select(tensor, selection).is_alias_of(tensor));
  EXPECT_FALSE(select_copies(selection));
}

TEST(Select, TakesRunsInTheOrderGiven) {
  const Selection selection{{0, {{2, 2}, {0, 1}}}};
  EXPECT_TRUE(at::equal(select(at::arange(4), selection), at::tensor({2, 3, 0})));
  EXPECT_TRUE(select_copies(selection));
}

}  // namespace
}  // namespace funcol::selection_test
