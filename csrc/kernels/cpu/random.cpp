#include "kernels/random.h"

#include <algorithm>

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
  visit_values<T>(numbers, [&](const auto& values) { fill(out, values, key, first, count); });
}

template void fill_random(float*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);
template void fill_random(double*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);
template void fill_random(int64_t*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);
template void fill_random(bool*, const RandomNumbers&, const RandomKey&, int64_t, int64_t);

}  // namespace funcol::kernels
