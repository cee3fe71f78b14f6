// A map of limited size that still hits on a cycle of keys longer than itself.
//
// Least-recently-used order never hits on such a cycle: each key is evicted just before its next lookup. Here
// a full cache admits one new key in kOneIn, in place of entries drawn at random, so most entries outlive the
// cycle: on a cycle of twice the capacity about half of the lookups hit.
//
// A lookup reads one word of a flat index, then the entry. An index of hashes beside the entries takes less
// memory than nodes, and its words share cache lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "layout/heap_bytes.h"
#include "layout/tables.h"

namespace funcol {

// Keys have hash() and ==, and are constructible from the objects that look them up, which have the same
// hash() and compare equal. Keys that name meshes have is_on(mesh_id). heap_bytes() counts keys and values.
// Not thread-safe: the owner locks.
template <typename Key, typename Value>
class Cache final : public CacheBase {
 public:
  static constexpr uint64_t kOneIn = 16;

  explicit Cache(Table& table, size_t most_entries = std::numeric_limits<uint32_t>::max())
      : CacheBase(table), most_entries_(most_entries) {}
  ~Cache() override { table().bytes -= bytes_; }

  // Returns the value of `key`, or null. The pointer is valid until the cache changes.
  template <typename Lookup>
  const Value* find(const Lookup& key) const {
    const auto slot = find_slot(key, short_hash(key));
    return slots_.empty() || slots_[slot].place == kFree ? nullptr : &entries_[slots_[slot].place].value;
  }

  // Removes `key` and returns its value. Returns nullopt if the cache lacks `key`.
  std::optional<Value> extract(const Key& key) {
    const auto slot = find_slot(key, short_hash(key));
    if (slots_.empty() || slots_[slot].place == kFree) {
      return std::nullopt;
    }
    Entries removed;
    remove(slots_[slot].place, removed);
    return std::move(removed.front().value);
  }

  // Returns true if the cache admits a new key: it has room, or a draw picks the key, as it does one in
  // kOneIn. Call it before you compute an expensive value, and insert() after.
  bool admits() {
    return fits(bytes_ / (entries_.size() + 1) + 1) || (table().limit != 0 && draw() % kOneIn == 0);
  }

  // Stores `value` if the cache admits `key`.
  void insert_if_admitted(Key key, Value value) {
    if (admits()) {
      insert(std::move(key), std::move(value));
    }
  }

  // Stores `value`, and removes random entries if it needs their room.
  void insert(Key key, Value value) {
    const auto hash = short_hash(key);
    const auto bytes = static_cast<uint32_t>(bytes_of(key, value));
    if (const auto slot = find_slot(key, hash); !slots_.empty() && slots_[slot].place != kFree) {
      auto& entry = entries_[slots_[slot].place];
      count(bytes - int64_t{entry.bytes});
      entry.bytes = bytes;
      std::swap(entry.value, value);
      return;
    }
    if (bytes > table().limit) {
      return;
    }
    const auto removed = make_room(bytes);
    if (!fits(bytes)) {
      return;
    }
    if ((entries_.size() + 1) * 3 > slots_.size() * 2) {
      grow();
    }
    slots_[find_slot(key, hash)] = {hash, static_cast<uint32_t>(entries_.size())};
    entries_.push_back({std::move(key), std::move(value), hash, bytes});
    count(bytes);
  }

  size_t size() const override { return entries_.size(); }
  size_t bytes() const { return bytes_; }

  void clear() { const auto removed = remove_all(); }

  Removed remove_all() override {
    slots_.clear();
    count(-static_cast<int64_t>(bytes_));
    return std::make_shared<Entries>(std::exchange(entries_, {}));
  }

  Removed remove_mesh(uint64_t mesh_id) override {
    auto removed = std::make_shared<Entries>();
    if constexpr (requires(const Key& key) { key.is_on(mesh_id); }) {
      for (size_t place = entries_.size(); place-- > 0;) {
        if (entries_[place].key.is_on(mesh_id)) {
          remove(place, *removed);
        }
      }
    }
    return removed;
  }

  Removed make_room(size_t bytes) override {
    if (fits(bytes)) {
      return nullptr;
    }
    auto removed = std::make_shared<Entries>();
    while (!entries_.empty() && !fits(bytes)) {
      remove(draw() % entries_.size(), *removed);
    }
    return removed;
  }

 private:
  struct Entry {
    Key key;
    Value value;
    uint32_t hash;
    uint32_t bytes;
  };
  using Entries = std::deque<Entry>;  // grows at its end without moving entries

  static constexpr uint32_t kFree = std::numeric_limits<uint32_t>::max();
  struct Slot {
    uint32_t hash = 0;
    uint32_t place = kFree;  // of the entry
  };

  template <typename Lookup>
  static uint32_t short_hash(const Lookup& key) {
    const uint64_t hash = key.hash();
    return static_cast<uint32_t>(hash ^ hash >> 32);
  }

  static size_t bytes_of(const Key& key, const Value& value) {
    return sizeof(Entry) + 2 * sizeof(Slot) + heap_bytes(key) + heap_bytes(value);
  }

  bool fits(size_t bytes) const {
    return entries_.size() + (bytes != 0 ? 1 : 0) <= most_entries_ && table().bytes + bytes <= table().limit;
  }

  void count(int64_t bytes) {
    bytes_ += bytes;
    table().bytes += bytes;
  }

  // Returns the slot of `key`, or the free slot where it belongs.
  template <typename Lookup>
  size_t find_slot(const Lookup& key, uint32_t hash) const {
    if (slots_.empty()) {
      return 0;
    }
    size_t slot = hash & (slots_.size() - 1);
    while (slots_[slot].place != kFree &&
           !(slots_[slot].hash == hash && entries_[slots_[slot].place].key == key)) {
      slot = (slot + 1) & (slots_.size() - 1);
    }
    return slot;
  }

  size_t slot_of(size_t place) const {
    size_t slot = entries_[place].hash & (slots_.size() - 1);
    while (slots_[slot].place != place) {
      slot = (slot + 1) & (slots_.size() - 1);
    }
    return slot;
  }

  void grow() {
    const size_t size = slots_.empty() ? 16 : 2 * slots_.size();
    slots_.assign(size, {});
    for (size_t place = 0; place < entries_.size(); ++place) {
      size_t slot = entries_[place].hash & (size - 1);
      while (slots_[slot].place != kFree) {
        slot = (slot + 1) & (size - 1);
      }
      slots_[slot] = {entries_[place].hash, static_cast<uint32_t>(place)};
    }
  }

  // Moves an entry to `removed`, and the last entry to its place.
  void remove(size_t place, Entries& removed) {
    free_slot(slot_of(place));
    count(-int64_t{entries_[place].bytes});
    removed.push_back(std::move(entries_[place]));
    if (place + 1 != entries_.size()) {
      slots_[slot_of(entries_.size() - 1)].place = static_cast<uint32_t>(place);
      entries_[place] = std::move(entries_.back());
    }
    entries_.pop_back();
  }

  // Frees a slot and closes the gap: moves up later entries whose search starts at the gap or before it.
  void free_slot(size_t slot) {
    const size_t mask = slots_.size() - 1;
    for (size_t next = (slot + 1) & mask; slots_[next].place != kFree; next = (next + 1) & mask) {
      if (((next - slots_[next].hash) & mask) >= ((next - slot) & mask)) {
        slots_[slot] = slots_[next];
        slot = next;
      }
    }
    slots_[slot] = {};
  }

  // Draws from a xorshift generator, so that the same keys in the same order always leave the same entries.
  uint64_t draw() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 11;
  }

  size_t most_entries_;
  size_t bytes_ = 0;
  uint64_t state_ = 0x9E3779B97F4A7C15;
  Entries entries_;
  std::vector<Slot> slots_;  // a power of two, at least a third of them free
};

}  // namespace funcol
