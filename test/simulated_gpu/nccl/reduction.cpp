#include "nccl/reduction.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>

namespace simulated_gpu::nccl {
namespace {

// In what a type is reduced.
template <typename T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<__half> {
  using type = float;
};
template <>
struct Accumulator<__nv_bfloat16> {
  using type = float;
};
template <>
struct Accumulator<__nv_fp8_e4m3> {
  using type = float;
};
template <>
struct Accumulator<__nv_fp8_e5m2> {
  using type = float;
};

// NOLINTBEGIN(bugprone-branch-clone): `run` is called with other types
// Calls `run` with a value of the C++ type of `type`.
template <typename Run>
void with_type(ncclDataType_t type, Run run) {
  switch (type) {
    case ncclInt8:
      return run(int8_t());
    case ncclUint8:
      return run(uint8_t());
    case ncclInt32:
      return run(int32_t());
    case ncclUint32:
      return run(uint32_t());
    case ncclInt64:
      return run(int64_t());
    case ncclUint64:
      return run(uint64_t());
    case ncclFloat16:
      return run(__half());
    case ncclFloat32:
      return run(float());
    case ncclFloat64:
      return run(double());
    case ncclBfloat16:
      return run(__nv_bfloat16());
    case ncclFloat8e4m3:
      return run(__nv_fp8_e4m3());
    case ncclFloat8e5m2:
      return run(__nv_fp8_e5m2());
    default:
      throw std::invalid_argument("no data type of NCCL: " + std::to_string(static_cast<int>(type)));
  }
}
// NOLINTEND(bugprone-branch-clone)

// Blocks are small enough to stay in the cache, and their loops simple enough to be vectorized.
template <typename T, typename Combine>
void reduce_with(const std::vector<const void*>& parts, T* output, size_t count, bool average,
                 Combine combine) {
  using Value = typename Accumulator<T>::type;
  constexpr size_t kBlock = 1024;
  std::array<Value, kBlock> block;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      const T* const part = static_cast<const T*>(parts[rank]) + begin;
      for (size_t i = 0; i < size; ++i) {
        const auto value = static_cast<Value>(part[i]);
        block[i] = rank == 0 ? value : static_cast<Value>(combine(block[i], value));
      }
    }
    const auto divisor = static_cast<Value>(average ? parts.size() : 1);
    for (size_t i = 0; i < size; ++i)
      output[begin + i] = static_cast<T>(static_cast<Value>(block[i] / divisor));
  }
}

template <typename T>
void reduce_typed(const std::vector<const void*>& parts, T* output, size_t count, ncclRedOp_t op) {
  const auto run = [&](auto combine) { reduce_with<T>(parts, output, count, op == ncclAvg, combine); };
  switch (static_cast<int>(op)) {
    case ncclSum:
    case ncclAvg:
      return run([](auto a, auto b) { return a + b; });
    case ncclProd:
      return run([](auto a, auto b) { return a * b; });
    case ncclMax:
      return run([](auto a, auto b) { return a != a || a > b ? a : b; });
    case ncclMin:
      return run([](auto a, auto b) { return a != a || a < b ? a : b; });
    default:
      throw std::invalid_argument("no built-in reduce op of NCCL: " + std::to_string(static_cast<int>(op)));
  }
}

}  // namespace

bool is_known(ncclDataType_t type) { return type >= 0 && type < ncclNumTypes; }

size_t size_of(ncclDataType_t type) {
  size_t size = 0;
  with_type(type, [&](auto value) { size = sizeof value; });
  return size;
}

std::string name_of(ncclDataType_t type) {
  static const char* const names[] = {"int8",    "uint8",    "int32",       "uint32",
                                      "int64",   "uint64",   "float16",     "float32",
                                      "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
  return is_known(type) ? names[type] : "unknown type " + std::to_string(static_cast<int>(type));
}

std::string name_of(ncclRedOp_t op) {
  static const char* const names[] = {"sum", "product", "maximum", "minimum", "average"};
  return op >= 0 && op < ncclNumOps ? names[op] : "premultiplied sum";
}

void reduce(const std::vector<const void*>& parts, void* output, size_t count, ncclDataType_t type,
            ncclRedOp_t op) {
  with_type(type, [&](auto value) { reduce_typed(parts, static_cast<decltype(value)*>(output), count, op); });
}

void multiply(void* values, size_t count, ncclDataType_t type, const void* factor) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    using Value = typename Accumulator<T>::type;
    const auto by = static_cast<Value>(*static_cast<const T*>(factor));
    auto* const typed = static_cast<T*>(values);
    for (size_t i = 0; i < count; ++i)
      typed[i] = static_cast<T>(static_cast<Value>(static_cast<Value>(typed[i]) * by));
  });
}

}  // namespace simulated_gpu::nccl
