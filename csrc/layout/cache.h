// A map of limited size that still serves a cycle of keys longer than itself.
//
// Least-recently-used order never hits on such a cycle: each key goes just before it comes again. Here a full
// cache admits one new key in kOneIn, in place of an entry drawn at random, so most entries outlive the
// cycle: on a cycle of twice the capacity about half of the lookups hit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>

namespace funcol {

// Not thread-safe: the owner locks. Values are destroyed last, since a destructor may call the cache.
template <typename Key, typename Value, typename Hash>
class Cache {
 public:
  static constexpr uint64_t kOneIn = 16;

  explicit Cache(size_t capacity) : capacity_(capacity) {}

  // A copy of the value of `key`, which outlives its entry, or nothing.
  std::optional<Value> get(const Key& key) const {
    const auto found = places_.find(&key);
    return found == places_.end() ? std::nullopt : std::optional<Value>(found->second->second);
  }

  // Remembers `value`, unless the cache is full and does not admit `key`.
  void put(Key key, Value value) {
    if (const auto found = places_.find(&key); found != places_.end()) {
      std::swap(found->second->second, value);
    } else if (entries_.size() < capacity_) {
      auto& entry = entries_.emplace_back(std::move(key), std::move(value));
      places_.emplace(&entry.first, &entry);
    } else if (capacity_ != 0 && draw() % kOneIn == 0) {
      auto& entry = entries_[draw() % capacity_];
      places_.erase(&entry.first);
      std::swap(entry.first, key);
      std::swap(entry.second, value);
      places_.emplace(&entry.first, &entry);
    }
  }

  size_t size() const { return entries_.size(); }

  void clear() {
    places_.clear();
    const auto gone = std::exchange(entries_, {});
  }

 private:
  using Entry = std::pair<Key, Value>;
  struct HashOfKey {
    size_t operator()(const Key* key) const { return Hash()(*key); }
  };
  struct EqualKeys {
    bool operator()(const Key* a, const Key* b) const { return *a == *b; }
  };

  // A xorshift generator: the same keys in the same order always leave the same entries.
  uint64_t draw() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 11;
  }

  size_t capacity_;
  uint64_t state_ = 0x9E3779B97F4A7C15;
  std::deque<Entry> entries_;  // grows at its end alone, so that entries keep their addresses
  std::unordered_map<const Key*, Entry*, HashOfKey, EqualKeys> places_;
};

}  // namespace funcol
