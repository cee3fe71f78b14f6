// Fills memory with random numbers of a distribution, by the positions of the elements (random_values.h).
//
// A caller has the elements of a shard in runs, whose positions in the full tensor follow each other, and
// calls the kernel once a run. So every rank computes for a position what any other rank computes.
#pragma once

#include <cstdint>

#include "kernels/random_values.h"

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

// CPU. Writes the elements at the positions [first, first + count) to `out`. T is float, double, int64_t or
// bool. int64_t and bool elements may be integers, geometric or Bernoulli numbers.
template <typename T>
void fill_random(T* out, const RandomNumbers& numbers, const RandomKey& key, int64_t first, int64_t count);

}  // namespace funcol::kernels
