#include "kernels/random.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <type_traits>

namespace funcol::kernels {
namespace {

template <typename T, typename Values>
void fill(T* out, const Values& values, const RandomKey& key, int64_t first, int64_t count) {
  constexpr int64_t kNum = Values::kNum;
  const auto fill_part = [&](int64_t skipped, int64_t num) {
    T block[kNum];
    values(random_bits(key, static_cast<uint64_t>(first / kNum)), block);
    std::copy_n(block + skipped, num, out);
    first += num;
    out += num;
    count -= num;
  };
  if (const int64_t skipped = first % kNum; skipped != 0 && count > 0) {
    fill_part(skipped, std::min(kNum - skipped, count));
  }
  for (; count >= kNum; first += kNum, out += kNum, count -= kNum) {
    values(random_bits(key, static_cast<uint64_t>(first / kNum)), out);
  }
  if (count > 0) {
    fill_part(0, count);
  }
}

}  // namespace

template <typename T>
void fill_random(T* out, const RandomNumbers& numbers, const RandomKey& key, int64_t first, int64_t count) {
  const auto [a, b] = numbers.numbers;
  const auto run = [&](const auto& values) { fill(out, values, key, first, count); };
  const auto run_inverse = [&]<typename Inverse>(const Inverse& inverse) {
    run(InverseValues<T, Inverse>{inverse});
  };
  switch (numbers.distribution) {
    case Distribution::kBernoulli:
      return run_inverse(Bernoulli{a});
    case Distribution::kGeometric:
      return run_inverse(Geometric{std::log1p(-a)});
    case Distribution::kIntegers:
      return run(IntegerValues<T>{numbers.low, numbers.range});
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<T>) {
    switch (numbers.distribution) {
      case Distribution::kUniform:
        return run(UniformValues<T>{static_cast<T>(a), static_cast<T>(b), numbers.num_digits});
      case Distribution::kNormal:
      case Distribution::kLogNormal:
        return run(NormalValues<T>{a, b, numbers.distribution == Distribution::kLogNormal});
      case Distribution::kCauchy:
        return run_inverse(Cauchy{a, b});
      case Distribution::kExponential:
        return run_inverse(Exponential{a});
      default:
        break;
    }
  }
  assert(false);
}

template void fill_random(float*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);
template void fill_random(double*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);
template void fill_random(int64_t*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);
template void fill_random(bool*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);

}  // namespace funcol::kernels
