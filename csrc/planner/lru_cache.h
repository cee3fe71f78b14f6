// A least-recently-used cache: a map of limited size.
#pragma once

#include <cstddef>
#include <list>
#include <optional>
#include <unordered_map>
#include <utility>

namespace funcol {

// Hashes a key by its own function, hash().
struct KeyHash {
  template <typename Key>
  size_t operator()(const Key& key) const {
    return key.hash();
  }
};

// Not thread-safe: the owner locks.
template <typename Key, typename Value, typename Hash = KeyHash>
class LruCache {
 public:
  explicit LruCache(size_t capacity) : capacity_(capacity) {}

  // The value of `key`, or null. Valid until the next put().
  const Value* get(const Key& key) {
    const auto found = places_.find(&key);
    if (found == places_.end()) {
      return nullptr;
    }
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->second;
  }

  // Removes `key` and returns its value, or nothing.
  std::optional<Value> take(const Key& key) {
    const auto found = places_.find(&key);
    if (found == places_.end()) {
      return std::nullopt;
    }
    const auto entry = found->second;
    std::optional<Value> value(std::move(entry->second));
    places_.erase(found);
    entries_.erase(entry);
    return value;
  }

  void put(Key key, Value value) {
    if (const auto found = places_.find(&key); found != places_.end()) {
      found->second->second = std::move(value);
      return;
    }
    entries_.emplace_front(std::move(key), std::move(value));
    places_.emplace(&entries_.front().first, entries_.begin());
    if (entries_.size() > capacity_) {
      places_.erase(&entries_.back().first);
      entries_.pop_back();
    }
  }

  size_t size() const { return entries_.size(); }
  void clear() {
    places_.clear();
    const auto gone =
        std::exchange(entries_, {});  // values are destroyed last: a destructor may call the cache
  }

 private:
  using Entries = std::list<std::pair<Key, Value>>;
  struct HashOfKey {
    size_t operator()(const Key* key) const { return Hash()(*key); }
  };
  struct EqualKeys {
    bool operator()(const Key* a, const Key* b) const { return *a == *b; }
  };

  size_t capacity_;
  Entries entries_;  // most recently used first
  std::unordered_map<const Key*, typename Entries::iterator, HashOfKey, EqualKeys> places_;
};

}  // namespace funcol
