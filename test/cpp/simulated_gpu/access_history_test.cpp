#include "runtime/access_history.h"

#include <gtest/gtest.h>

namespace simulated_gpu::access_history_test {
namespace {

IssuedPointer issued(const std::string& name, uint64_t line, uint64_t number = 1) {
  return std::make_shared<Issued>(Issued{name, line, number});
}

Range bytes(uintptr_t begin, size_t size) { return {reinterpret_cast<const void*>(begin), size}; }

bool nothing_is_ordered(const Issued& /*earlier*/) { return false; }

TEST(AccessHistory, AReadConflictsWithAnUnorderedWriteOfAnyOfItsBytes) {
  AccessHistory history;
  EXPECT_FALSE(history.add(bytes(100, 8), true, issued("write", 1), nothing_is_ordered));
  const auto conflict = history.add(bytes(96, 8), false, issued("read", 2), nothing_is_ordered);
  ASSERT_TRUE(conflict);
  EXPECT_EQ(conflict->earlier->name, "write");
  EXPECT_TRUE(conflict->earlier_writes);
  EXPECT_FALSE(conflict->later_writes);
  EXPECT_EQ(conflict->bytes.begin, bytes(100, 0).begin);
  EXPECT_EQ(conflict->bytes.size, 4U);
}

TEST(AccessHistory, NeighboursDoNotConflict) {
  AccessHistory history;
  history.add(bytes(100, 8), true, issued("write", 1), nothing_is_ordered);
  EXPECT_FALSE(history.add(bytes(108, 8), true, issued("behind", 2), nothing_is_ordered));
  EXPECT_FALSE(history.add(bytes(92, 8), true, issued("before", 3), nothing_is_ordered));
}

TEST(AccessHistory, ReadsDoNotConflictWithReads) {
  AccessHistory history;
  history.add(bytes(100, 8), false, issued("first", 1), nothing_is_ordered);
  EXPECT_FALSE(history.add(bytes(100, 8), false, issued("second", 2), nothing_is_ordered));
}

TEST(AccessHistory, AWriteConflictsWithEveryReaderSinceTheLastWrite) {
  AccessHistory history;
  history.add(bytes(100, 8), true, issued("write", 1), nothing_is_ordered);
  history.add(bytes(100, 4), false, issued("first", 2), nothing_is_ordered);
  history.add(bytes(104, 4), false, issued("second", 3), nothing_is_ordered);
  const auto only_second_is_unordered = [](const Issued& earlier) { return earlier.name != "second"; };
  const auto conflict = history.add(bytes(100, 8), true, issued("again", 4), only_second_is_unordered);
  ASSERT_TRUE(conflict);
  EXPECT_EQ(conflict->earlier->name, "second");
  const auto later = history.add(bytes(100, 8), false, issued("read", 5), nothing_is_ordered);
  ASSERT_TRUE(later);
  EXPECT_EQ(later->earlier->name, "again");
}

TEST(AccessHistory, ALaterReadOfTheSameStreamStandsForTheEarlierOne) {
  AccessHistory history;
  history.add(bytes(100, 8), false, issued("early", 1, 1), nothing_is_ordered);
  history.add(bytes(100, 8), false, issued("late", 1, 2), nothing_is_ordered);
  const auto early_is_ordered = [](const Issued& earlier) { return earlier.name == "early"; };
  const auto conflict = history.add(bytes(100, 8), true, issued("write", 2), early_is_ordered);
  ASSERT_TRUE(conflict);
  EXPECT_EQ(conflict->earlier->name, "late");
}

TEST(AccessHistory, AnOperationDoesNotConflictWithItself) {
  AccessHistory history;
  const auto in_place = issued("in place", 1);
  EXPECT_FALSE(history.add(bytes(100, 8), false, in_place, nothing_is_ordered));
  EXPECT_FALSE(history.add(bytes(100, 8), true, in_place, nothing_is_ordered));
}

TEST(AccessHistory, ForgottenMemoryHasNoUsers) {
  AccessHistory history;
  history.add(bytes(100, 16), true, issued("write", 1), nothing_is_ordered);
  history.forget(bytes(104, 8));
  EXPECT_FALSE(history.add(bytes(104, 8), false, issued("read", 2), nothing_is_ordered));
  EXPECT_TRUE(history.add(bytes(112, 4), false, issued("rest", 3), nothing_is_ordered));
  EXPECT_TRUE(history.add(bytes(100, 4), false, issued("rest", 3), nothing_is_ordered));
}

TEST(AccessHistory, NoBytesAreNoUse) {
  AccessHistory history;
  history.add(bytes(100, 8), true, issued("write", 1), nothing_is_ordered);
  EXPECT_FALSE(history.add(bytes(100, 0), true, issued("nothing", 2), nothing_is_ordered));
}

}  // namespace
}  // namespace simulated_gpu::access_history_test
