// Inputs and shapes for tests of the CPU's and the GPU's copies between tensor order and rank-major order.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/rank_major.h"

namespace funcol::kernels {

using Bytes = std::vector<uint8_t>;

constexpr uint8_t kGuard = 0xA5;  // bytes that a copy must not change
constexpr size_t kMargin = 64;    // of them behind an output

// Returns bytes without a short period, so that a row in the wrong place is seen.
inline Bytes numbered_bytes(int64_t count) {
  Bytes bytes(static_cast<size_t>(count));
  uint32_t state = 1;
  for (auto& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<uint8_t>(state >> 24U);
  }
  return bytes;
}

using Sizes = std::tuple<int64_t, int64_t, int64_t>;  // row_bytes, num_ranks, outer

inline ShardShape shape_of(const Sizes& sizes) {
  return {.num_ranks = std::get<1>(sizes), .outer = std::get<2>(sizes), .row_bytes = std::get<0>(sizes)};
}

inline std::string name_of_shape(const ShardShape& s) {
  return "rows_of_" + std::to_string(s.row_bytes) + "_ranks_" + std::to_string(s.num_ranks) + "_outer_" +
         std::to_string(s.outer);
}

inline std::string name_of_sizes(const ::testing::TestParamInfo<Sizes>& param) {
  return name_of_shape(shape_of(param.param));
}

// Bytes before the input, before the output; row_bytes.
using Offsets = std::tuple<int64_t, int64_t, int64_t>;

inline std::string name_of_offsets(const ::testing::TestParamInfo<Offsets>& param) {
  const auto& [in_offset, out_offset, row_bytes] = param.param;
  return "in_" + std::to_string(in_offset) + "_out_" + std::to_string(out_offset) + "_rows_of_" +
         std::to_string(row_bytes);
}

}  // namespace funcol::kernels
