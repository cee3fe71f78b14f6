#include "layout/cache.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace funcol::cache_test {
namespace {

using Numbers = Cache<int, int, std::hash<int>>;

int hits_of_a_cycle(Numbers& cache, int length) {
  int hits = 0;
  for (int key = 0; key < length; ++key) {
    if (const auto known = cache.get(key)) {
      EXPECT_EQ(*known, 3 * key);
      ++hits;
    } else {
      cache.put(key, 3 * key);
    }
  }
  return hits;
}

TEST(Cache, KeepsAllUntilItIsFull) {
  Numbers cache(100);
  EXPECT_EQ(hits_of_a_cycle(cache, 100), 0);
  EXPECT_EQ(hits_of_a_cycle(cache, 100), 100);
}

TEST(Cache, ServesACycleLongerThanItself) {
  Numbers cache(1000);
  int hits = 0;
  for (int round = 0; round < 100; ++round) {
    hits += hits_of_a_cycle(cache, 2000);
    ASSERT_LE(cache.size(), 1000U);
  }
  EXPECT_GT(hits, 100 * 2000 * 2 / 5);
}

TEST(Cache, TakesUpNewKeysWhenItIsFull) {
  Numbers cache(100);
  hits_of_a_cycle(cache, 100);
  for (int round = 0; round < 500; ++round) {
    if (!cache.get(1000)) {
      cache.put(1000, 7);
    }
  }
  EXPECT_EQ(cache.get(1000), 7);
  EXPECT_EQ(cache.size(), 100U);
}

TEST(Cache, ReplacesTheValueOfAKey) {
  Numbers cache(1);
  cache.put(1, 2);
  cache.put(1, 3);
  EXPECT_EQ(cache.get(1), 3);
  EXPECT_EQ(cache.size(), 1U);
}

TEST(Cache, KeepsNothingWithoutCapacity) {
  Numbers cache(0);
  for (int key = 0; key < 100; ++key) {
    cache.put(key, key);
  }
  EXPECT_EQ(cache.size(), 0U);
}

TEST(Cache, GivesValuesThatOutliveTheirEntries) {
  Cache<int, std::shared_ptr<std::string>, std::hash<int>> cache(1);
  cache.put(1, std::make_shared<std::string>("one"));
  const auto known = cache.get(1);
  cache.clear();
  ASSERT_TRUE(known.has_value());
  EXPECT_EQ(**known, "one");
}

TEST(Cache, MayBeUsedByWhatItLetsGo) {
  struct Last {
    explicit Last(std::function<void()> what) : then(std::move(what)) {}
    ~Last() { then(); }

    std::function<void()> then;
  };
  Cache<int, std::shared_ptr<Last>, std::hash<int>> cache(1);
  int num_gone = 0;
  const auto look = [&] {
    ++num_gone;
    EXPECT_FALSE(cache.get(-1).has_value());
  };
  cache.put(0, std::make_shared<Last>(look));
  for (int key = 1; key < 200; ++key) {
    cache.put(key, std::make_shared<Last>(look));
  }
  cache.clear();
  EXPECT_EQ(num_gone, 200);
}

}  // namespace
}  // namespace funcol::cache_test
