// Combines numbers, placements and layouts into one hash.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "layout/layout.h"

namespace funcol {

class Hash {
 public:
  void add(uint64_t number) {
    value_ = (value_ ^ number) * 0x9E3779B97F4A7C15U;
    value_ ^= value_ >> 32;
  }
  template <typename Numbers>
  void add_all(const Numbers& numbers) {
    add(numbers.size());
    for (const auto number : numbers) {
      add(static_cast<uint64_t>(number));
    }
  }
  void add(const Placement& placement) {
    add(static_cast<uint64_t>(placement.kind) << 8 | static_cast<uint64_t>(placement.op));
    add(static_cast<uint64_t>(placement.dim) << 32 ^ static_cast<uint64_t>(placement.split_factor));
    add(placement.mask);
    add(std::bit_cast<uint64_t>(placement.norm.value));
  }
  void add(const Layout& layout) {
    for (const auto& placement : layout.placements) {
      add(placement);
    }
    for (const auto& axes : layout.order) {
      add_all(axes);
    }
  }
  size_t value() const { return value_; }

 private:
  uint64_t value_ = 0x243F6A8885A308D3U;
};

}  // namespace funcol
