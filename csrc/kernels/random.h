// Random numbers by position: the value of element i depends on a key and i alone.
//
// A key is the seed and offset that one call of an operator has drawn from a generator. Philox4x32-10 (Salmon
// and others, "Parallel Random Numbers: As Easy as 1, 2, 3") turns the key and the number of a block into 128
// bits, the bits of four neighbouring elements, or of two that need 64 bits each.
//
// Worked case: element 6 of a float tensor takes word 2 of block 1; element 6 of a double tensor takes the
// first two words of block 3.
//
// All functions run on the host and in CUDA kernels. Transforms are computed in double precision, so that the
// results of both agree except in the last bit.
//
// A caller splits the elements of a shard into runs, whose positions in the full tensor are consecutive, or
// into boxes of several dims, and calls a kernel once for each. So every rank computes the same value for a
// position.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <type_traits>

#include "kernels/host_device.h"

namespace funcol::kernels {

enum class Distribution : uint8_t {
  kUniform,      // numbers {from, to}: in [from, to)
  kNormal,       // {mean, std}
  kLogNormal,    // {mean, std} of the logarithm
  kCauchy,       // {median, sigma}
  kExponential,  // {rate}
  kGeometric,    // {p}
  kBernoulli,    // {p}
  kIntegers,     // `low` and `range`
};

struct RandomNumbers {
  Distribution distribution = Distribution::kUniform;
  double numbers[2] = {0, 1};
  int64_t low = 0;
  uint64_t range = 0;   // 0: all 2^64
  int num_digits = 24;  // of uniform numbers in float elements
};

struct RandomKey {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

struct RandomBits {
  uint32_t words[4];

  FUNCOL_HOST_DEVICE uint64_t pair(size_t i) const {
    return uint64_t{words[2 * i]} | uint64_t{words[2 * i + 1]} << 32;
  }
};

// Returns the 128 bits of `block`, the low half of Philox's counter. The key's offset is the high half.
FUNCOL_HOST_DEVICE inline RandomBits random_bits(const RandomKey& key, uint64_t block) {
  auto c0 = static_cast<uint32_t>(block);
  auto c1 = static_cast<uint32_t>(block >> 32);
  auto c2 = static_cast<uint32_t>(key.offset);
  auto c3 = static_cast<uint32_t>(key.offset >> 32);
  auto k0 = static_cast<uint32_t>(key.seed);
  auto k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * c0;
    const uint64_t second = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// Elements of type T that take 64 bits each; others take 32.
template <typename T>
inline constexpr bool kIsWide = std::is_same_v<T, double>;

template <typename T>
inline constexpr int kNumInBlock = kIsWide<T> ? 2 : 4;

// Returns a number in the open interval (0, 1).
template <typename T>
FUNCOL_HOST_DEVICE double open_unit(const RandomBits& bits, int i) {
  if constexpr (kIsWide<T>) {
    return (static_cast<double>(bits.pair(i) >> 12) + 0.5) * 0x1p-52;
  } else {
    return (static_cast<double>(bits.words[i]) + 0.5) * 0x1p-32;
  }
}

// Each class below computes the kNum values of a block.

// Uniform numbers in [from, to) with `num_digits` random binary digits, the precision of the tensor's dtype.
template <typename T>
struct UniformValues {
  static constexpr int kNum = kNumInBlock<T>;
  T from;
  T to;
  int num_digits;

  FUNCOL_HOST_DEVICE void operator()(const RandomBits& bits, T* out) const {
    for (int i = 0; i < kNum; ++i) {
      T unit = 0;
      if constexpr (kIsWide<T>) {
        unit = static_cast<T>(bits.pair(i) >> 11) * static_cast<T>(0x1p-53);
      } else {
        unit = static_cast<T>(bits.words[i] >> (32 - num_digits)) *
               (static_cast<T>(1) / static_cast<T>(uint32_t{1} << num_digits));
      }
      const T value = unit * (to - from) + from;
      out[i] = value < to ? value : from;  // rounding may reach `to`
    }
  }
};

// Normal numbers by Box and Muller's transform; log-normal ones if `is_log`.
template <typename T>
struct NormalValues {
  static constexpr int kNum = kNumInBlock<T>;
  double mean;
  double std;
  bool is_log;

  FUNCOL_HOST_DEVICE void operator()(const RandomBits& bits, T* out) const {
    for (int i = 0; i < kNum; i += 2) {
      const double radius = std::sqrt(-2 * std::log(open_unit<T>(bits, i)));
      const double angle = 2 * std::numbers::pi * open_unit<T>(bits, i + 1);
      out[i] = value(radius * std::cos(angle));
      out[i + 1] = value(radius * std::sin(angle));
    }
  }

 private:
  FUNCOL_HOST_DEVICE T value(double standard) const {
    const double moved = standard * std + mean;
    return static_cast<T>(is_log ? std::exp(moved) : moved);
  }
};

// Numbers whose distribution function has a simple inverse; `Inverse` computes it.
template <typename T, typename Inverse>
struct InverseValues {
  static constexpr int kNum = kNumInBlock<T>;
  Inverse inverse;

  FUNCOL_HOST_DEVICE void operator()(const RandomBits& bits, T* out) const {
    for (int i = 0; i < kNum; ++i) {
      out[i] = static_cast<T>(inverse(open_unit<T>(bits, i)));
    }
  }
};

struct Cauchy {
  double median;
  double sigma;

  FUNCOL_HOST_DEVICE double operator()(double unit) const {
    return median + sigma * std::tan(std::numbers::pi * (unit - 0.5));
  }
};

struct Exponential {
  double rate;

  FUNCOL_HOST_DEVICE double operator()(double unit) const { return -std::log(unit) / rate; }
};

// The number of trials up to the first success, from 1.
struct Geometric {
  double log_of_failure;  // log(1 - p), negative; -infinity for p = 1

  FUNCOL_HOST_DEVICE double operator()(double unit) const {
    const double trials = std::ceil(std::log(unit) / log_of_failure);
    return trials < 1 ? 1 : trials;
  }
};

struct Bernoulli {
  double probability;

  FUNCOL_HOST_DEVICE double operator()(double unit) const { return unit < probability ? 1 : 0; }
};

// Integers low, low + 1, ..., low + range - 1. A range of 0 means all 2^64.
template <typename T>
struct IntegerValues {
  static constexpr int kNum = 2;
  int64_t low;
  uint64_t range;

  FUNCOL_HOST_DEVICE void operator()(const RandomBits& bits, T* out) const {
    for (int i = 0; i < kNum; ++i) {
      const uint64_t drawn = range == 0 ? bits.pair(i) : high_half(bits.pair(i), range);
      out[i] = static_cast<T>(static_cast<int64_t>(static_cast<uint64_t>(low) + drawn));
    }
  }

 private:
  // Returns the upper 64 bits of the product.
  FUNCOL_HOST_DEVICE static uint64_t high_half(uint64_t a, uint64_t b) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
  }
};

// Calls `visit` with the class above that computes elements of type T. int64_t and bool elements may be
// integers, geometric or Bernoulli numbers; `visit` is not called for others.
template <typename T, typename Visit>
FUNCOL_HOST_DEVICE void visit_values(const RandomNumbers& numbers, const Visit& visit) {
  const double a = numbers.numbers[0];
  const double b = numbers.numbers[1];
  switch (numbers.distribution) {
    case Distribution::kBernoulli:
      return visit(InverseValues<T, Bernoulli>{{a}});
    case Distribution::kGeometric:
      return visit(InverseValues<T, Geometric>{{std::log1p(-a)}});
    case Distribution::kIntegers:
      return visit(IntegerValues<T>{numbers.low, numbers.range});
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<T>) {
    switch (numbers.distribution) {
      case Distribution::kUniform:
        return visit(UniformValues<T>{static_cast<T>(a), static_cast<T>(b), numbers.num_digits});
      case Distribution::kNormal:
      case Distribution::kLogNormal:
        return visit(NormalValues<T>{a, b, numbers.distribution == Distribution::kLogNormal});
      case Distribution::kCauchy:
        return visit(InverseValues<T, Cauchy>{{a, b}});
      case Distribution::kExponential:
        return visit(InverseValues<T, Exponential>{{a}});
      default:
        break;
    }
  }
}

// Writes the elements at the positions [first, first + count) to `out`. T is float, double, int64_t or
// bool. int64_t and bool elements may be integers, geometric or Bernoulli numbers.
template <typename T>
void fill_random(T* out, const RandomNumbers& numbers, const RandomKey& key, int64_t first, int64_t count);

// Elements of a shard whose positions have a stride for each dim, in the shard and in the full tensor.
struct RandomBox {
  static constexpr int kMaxDims = 16;

  struct Dim {
    int64_t size = 1;
    int64_t local_stride = 0;
    int64_t full_stride = 0;
  };

  int64_t local = 0;  // position of the first element in the shard
  int64_t full = 0;   // and in the full tensor
  int num_dims = 0;
  Dim dims[kMaxDims] = {};

  FUNCOL_HOST_DEVICE int64_t numel() const {
    int64_t numel = 1;
    for (int i = 0; i < num_dims; ++i) {
      numel *= dims[i].size;
    }
    return numel;
  }
};

}  // namespace funcol::kernels
