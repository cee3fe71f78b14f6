#include "planner/lru_cache.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace funcol::lru_cache_test {
namespace {

TEST(LruCache, KeepsWhatIsAskedFor) {
  LruCache<int, std::string, std::hash<int>> cache(2);
  cache.put(1, "one");
  cache.put(2, "two");
  cache.get(1);
  cache.put(3, "three");
  EXPECT_EQ(*cache.get(1), "one");
  EXPECT_EQ(cache.get(2), nullptr);
}

TEST(LruCache, ReplacesTheValueOfAKey) {
  LruCache<int, std::string, std::hash<int>> cache(2);
  cache.put(1, "one");
  cache.put(1, "uno");
  EXPECT_EQ(*cache.get(1), "uno");
  EXPECT_EQ(cache.size(), 1);
}

TEST(LruCache, GivesAwayTheValueOfAKey) {
  LruCache<int, std::string, std::hash<int>> cache(2);
  cache.put(1, "one");
  EXPECT_EQ(cache.take(1), "one");
  EXPECT_EQ(cache.get(1), nullptr);
}

TEST(LruCache, HasNothingToGiveAwayForAnotherKey) {
  LruCache<int, std::string, std::hash<int>> cache(2);
  cache.put(1, "one");
  EXPECT_EQ(cache.take(2), std::nullopt);
}

TEST(LruCache, KeepsTheOthersWhenOneIsTaken) {
  LruCache<int, std::string, std::hash<int>> cache(2);
  cache.put(1, "one");
  cache.put(2, "two");
  cache.take(2);
  cache.put(3, "three");
  EXPECT_EQ(*cache.get(1), "one");
}

TEST(LruCache, MayBeUsedByWhatItLetsGo) {
  struct Last {
    std::function<void()> action;
    ~Last() { action(); }
  };
  LruCache<int, std::shared_ptr<Last>, std::hash<int>> cache(2);
  bool is_there = true;
  cache.put(1, std::make_shared<Last>(Last{[] {}}));
  (*cache.get(1))->action = [&] {
    is_there = cache.get(1) != nullptr;
    cache.put(2, nullptr);
  };
  cache.clear();
  EXPECT_FALSE(is_there);
  EXPECT_EQ(cache.size(), 1);
}

}  // namespace
}  // namespace funcol::lru_cache_test
