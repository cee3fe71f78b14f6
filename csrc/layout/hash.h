// A hash of several numbers.
#pragma once

#include <cstddef>
#include <cstdint>

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
  size_t value() const { return value_; }

 private:
  uint64_t value_ = 0x243F6A8885A308D3U;
};

}  // namespace funcol
