// Estimates of the heap memory that values own, which caches count.
//
// A type of another folder has a member heap_bytes(), or an overload beside it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "layout/layout.h"
#include "layout/tensor_meta.h"

namespace funcol {

// An estimate of the bytes that an allocator adds to a block for rounding and bookkeeping.
constexpr size_t kBlockBytes = 16;

template <typename T>
requires(std::is_trivially_copyable_v<T> && !requires(const T& value) { value.heap_bytes(); }) size_t
    heap_bytes(const T& /*value*/) {
  return 0;
}

template <typename T>
requires requires(const T& value) { value.heap_bytes(); }
size_t heap_bytes(const T& value) { return value.heap_bytes(); }

inline size_t heap_bytes(const std::string& text) {
  return text.capacity() <= std::string().capacity() ? 0 : text.capacity() + kBlockBytes;
}

template <typename T>
size_t heap_bytes(const std::vector<T>& values) {
  size_t bytes = values.capacity() == 0 ? 0 : values.capacity() * sizeof(T) + kBlockBytes;
  if constexpr (!std::is_trivially_copyable_v<T>) {
    for (const auto& value : values) {
      bytes += heap_bytes(value);
    }
  }
  return bytes;
}

inline size_t heap_bytes(const std::vector<bool>& values) { return values.capacity() / 8 + kBlockBytes; }

template <typename T>
requires(!std::is_trivially_copyable_v<T>) size_t heap_bytes(const std::optional<T>& value) {
  return value.has_value() ? heap_bytes(*value) : 0;
}

// Counts the object as if this were its only owner.
template <typename T>
size_t heap_bytes(const std::shared_ptr<T>& object) {
  return object == nullptr ? 0 : sizeof(T) + 2 * kBlockBytes + heap_bytes(*object);
}

inline size_t heap_bytes(const Layout& layout) {
  return heap_bytes(layout.placements) + heap_bytes(layout.order);
}

inline size_t heap_bytes(const TensorMeta& meta) { return heap_bytes(meta.shape) + heap_bytes(meta.stride); }

}  // namespace funcol
