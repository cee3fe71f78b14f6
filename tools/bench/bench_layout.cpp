// Bandwidth of the CPU layout kernels, one thread, beside a memcpy of as many bytes.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "kernels/rank_major.h"

namespace {

using funcol::kernels::merge_shards;
using funcol::kernels::ShardShape;
using funcol::kernels::split_shards;

constexpr int64_t kNumBytes = 64 << 20;
constexpr int64_t kNumRanks = 8;

template <typename Copy>
void measure(benchmark::State& state, const Copy& copy) {
  const std::vector<char> in(kNumBytes, 1);
  std::vector<char> out(kNumBytes, 2);
  for (auto _ : state) {
    copy(in.data(), out.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kNumBytes);
}

ShardShape shape_of_rows(int64_t row_bytes) {
  return {.num_ranks = kNumRanks, .outer = kNumBytes / kNumRanks / row_bytes, .row_bytes = row_bytes};
}

void bench_memcpy(benchmark::State& state) {
  measure(state, [](const char* in, char* out) { std::memcpy(out, in, kNumBytes); });
}

void bench_merge(benchmark::State& state) {
  const auto shape = shape_of_rows(state.range(0));
  measure(state, [&](const char* in, char* out) { merge_shards(in, out, shape, 0, shape.num_rows()); });
}

void bench_split(benchmark::State& state) {
  const auto shape = shape_of_rows(state.range(0));
  measure(state, [&](const char* in, char* out) { split_shards(in, out, shape, 0, shape.num_rows()); });
}

BENCHMARK(bench_memcpy)->Name("memcpy");
BENCHMARK(bench_merge)->Name("merge_shards")->ArgName("row_bytes")->Arg(4)->Arg(64)->Arg(1024)->Arg(65536);
BENCHMARK(bench_split)->Name("split_shards")->ArgName("row_bytes")->Arg(4)->Arg(64)->Arg(1024)->Arg(65536);

}  // namespace

BENCHMARK_MAIN();
