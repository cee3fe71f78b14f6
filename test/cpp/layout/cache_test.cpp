#include "layout/cache.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace funcol::cache_test {
namespace {

struct Number {
  int value;

  size_t hash() const { return std::hash<int>()(value) * 0x9E3779B97F4A7C15; }
  bool is_on(uint64_t mesh_id) const { return static_cast<uint64_t>(value) % 10 == mesh_id; }
  friend bool operator==(const Number&, const Number&) = default;
};

using Numbers = Cache<Number, int>;

int hits_of_a_cycle(Numbers& cache, int length) {
  int hits = 0;
  for (int key = 0; key < length; ++key) {
    if (const auto* const known = cache.find(Number{key})) {
      EXPECT_EQ(*known, 3 * key);
      ++hits;
    } else {
      cache.insert_if_admitted({key}, 3 * key);
    }
  }
  return hits;
}

size_t bytes_of_entry() {
  Table table{1 << 20};
  Numbers cache(table);
  cache.insert_if_admitted({1}, 1);
  return table.bytes;
}

class OfAHundred : public ::testing::Test {
 protected:
  Table table_{100 * bytes_of_entry()};
  Numbers cache_{table_};
};

TEST_F(OfAHundred, KeepsAllUntilItIsFull) {
  EXPECT_EQ(hits_of_a_cycle(cache_, 100), 0);
  EXPECT_EQ(hits_of_a_cycle(cache_, 100), 100);
  EXPECT_EQ(table_.bytes, table_.limit);
}

TEST_F(OfAHundred, HitsOnACycleLongerThanItself) {
  int hits = 0;
  for (int round = 0; round < 1000; ++round) {
    hits += hits_of_a_cycle(cache_, 200);
    ASSERT_LE(table_.bytes, table_.limit);
  }
  EXPECT_GT(hits, 1000 * 200 * 2 / 5);
}

TEST_F(OfAHundred, TakesUpNewKeysWhenItIsFull) {
  hits_of_a_cycle(cache_, 100);
  for (int round = 0; round < 500 && cache_.find(Number{1000}) == nullptr; ++round) {
    cache_.insert_if_admitted({1000}, 7);
  }
  ASSERT_NE(cache_.find(Number{1000}), nullptr);
  EXPECT_EQ(*cache_.find(Number{1000}), 7);
  EXPECT_EQ(cache_.size(), 100U);
}

TEST_F(OfAHundred, ReplacesTheValueOfAKey) {
  cache_.insert_if_admitted({1}, 2);
  cache_.insert_if_admitted({1}, 3);
  EXPECT_EQ(*cache_.find(Number{1}), 3);
  EXPECT_EQ(cache_.size(), 1U);
}

TEST_F(OfAHundred, GivesAwayTheValueOfAKeyAndKeepsTheOthers) {
  hits_of_a_cycle(cache_, 50);
  for (int key = 0; key < 50; key += 2) {
    EXPECT_EQ(cache_.extract({key}), 3 * key);
    EXPECT_EQ(cache_.extract({key}), std::nullopt);
  }
  for (int key = 0; key < 50; ++key) {
    EXPECT_EQ(cache_.find(Number{key}) != nullptr, key % 2 == 1) << key;
  }
  EXPECT_EQ(cache_.size(), 25U);
  EXPECT_EQ(table_.bytes, 25 * bytes_of_entry());
}

TEST_F(OfAHundred, RemovesTheEntriesOfAMesh) {
  hits_of_a_cycle(cache_, 100);
  cache_.remove_mesh(3);
  EXPECT_EQ(cache_.size(), 90U);
  EXPECT_EQ(cache_.find(Number{33}), nullptr);
  EXPECT_NE(cache_.find(Number{34}), nullptr);
}

TEST_F(OfAHundred, ShrinksToALowerLimit) {
  hits_of_a_cycle(cache_, 100);
  set_table_limit(table_, table_.limit / 4);
  EXPECT_EQ(cache_.size(), 25U);
  set_table_limit(table_, 0);
  EXPECT_EQ(cache_.size(), 0U);
  cache_.insert_if_admitted({1}, 1);
  EXPECT_EQ(cache_.size(), 0U) << "a limit of 0 turns a table off";
}

TEST_F(OfAHundred, SharesItsLimitWithTheTablesOtherCaches) {
  hits_of_a_cycle(cache_, 60);
  Numbers other(table_);
  hits_of_a_cycle(other, 60);
  EXPECT_LE(cache_.size() + other.size(), 100U);
  clear_table(table_);
  EXPECT_EQ(cache_.size() + other.size(), 0U);
  EXPECT_EQ(table_.bytes, 0U);
}

TEST(Cache, IsBoundedByTheNumberOfEntriesToo) {
  Table table{1 << 20};
  Numbers cache(table, 7);
  hits_of_a_cycle(cache, 100);
  EXPECT_EQ(cache.size(), 7U);
}

TEST(Cache, CountsWhatKeysAndValuesHold) {
  Table table{1 << 20};
  Cache<Number, std::string> cache(table);
  cache.insert_if_admitted({1}, "short");
  const auto of_short = table.bytes;
  cache.insert_if_admitted({1}, std::string(1000, 'x'));
  EXPECT_GE(table.bytes, of_short + 1000);
}

TEST(Cache, MayBeUsedByWhatItReleases) {
  struct Last {
    explicit Last(std::function<void()> what) : then(std::move(what)) {}
    ~Last() { then(); }
    size_t heap_bytes() const { return 0; }

    std::function<void()> then;
  };
  Table table{2 * bytes_of_entry()};
  Cache<Number, std::shared_ptr<Last>> cache(table);
  int num_gone = 0;
  const auto look = [&] {
    ++num_gone;
    EXPECT_EQ(cache.find(Number{-1}), nullptr);
  };
  for (int key = 0; key < 200; ++key) {
    cache.insert_if_admitted({key}, std::make_shared<Last>(look));
  }
  cache.clear();
  EXPECT_EQ(num_gone, 200);
}

TEST(Tables, HaveLimitsOf248MiBInAll) {
  size_t limits = 0;
  for (const auto& [name, table] : tables()) {
    limits += table.limit;
  }
  EXPECT_EQ(limits, size_t{248} << 20);
}

}  // namespace
}  // namespace funcol::cache_test
