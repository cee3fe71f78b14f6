// Keys of caches as words: all that a remembered value depends on, written down one after another.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "layout/hash.h"
#include "layout/heap_bytes.h"

namespace funcol {

template <typename Words>
size_t hash_of_words(const Words& words) {
  Hash hash;
  hash.add_all(words);
  return hash.value();
}

// Adds a text's length and its bytes.
template <typename Words>
void add_text(Words& words, std::string_view text) {
  words.push_back(text.size());
  for (size_t begin = 0; begin < text.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + begin, std::min(text.size() - begin, sizeof word));
    words.push_back(word);
  }
}

struct WordKey {
  std::vector<uint64_t> words;

  void add(uint64_t word) { words.push_back(word); }
  // Adds the number of `values`, and each value.
  template <typename Values>
  void add_all(const Values& values) {
    add(values.size());
    for (const auto value : values) {
      add(static_cast<uint64_t>(value));
    }
  }
  void add(const TensorMeta& meta) {
    add(static_cast<uint64_t>(meta.dtype));
    add_all(meta.shape);
    add_all(meta.stride);
  }
  void add(const Placement& placement) {
    add(static_cast<uint64_t>(placement.kind) | static_cast<uint64_t>(placement.op) << 8 |
        (placement.is_norm() ? 1 << 16 : 0) | (placement.mask != 0 ? 1 << 17 : 0) |
        static_cast<uint64_t>(placement.dim) << 32);
    if (placement.is_shard()) {
      add(static_cast<uint64_t>(placement.split_factor));
    } else if (placement.is_norm()) {
      add(std::bit_cast<uint64_t>(placement.norm.value));
      add(placement.norm.is_integer ? 1 : 0);
    } else if (placement.mask != 0) {
      add(placement.mask);
    }
  }
  void add(const Layout& layout) {
    const bool is_in_mesh_order = layout.order == default_shard_order(layout.placements);
    add(layout.placements.size() << 1 | (is_in_mesh_order ? 1 : 0));
    for (const auto& placement : layout.placements) {
      add(placement);
    }
    if (!is_in_mesh_order) {
      add(layout.order.size());
      for (const auto& axes : layout.order) {
        add_all(axes);
      }
    }
  }

  size_t hash() const { return hash_of_words(words); }
  size_t heap_bytes() const { return funcol::heap_bytes(words); }
  friend bool operator==(const WordKey&, const WordKey&) = default;
};

}  // namespace funcol
