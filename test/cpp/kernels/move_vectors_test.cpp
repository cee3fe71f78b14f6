#include "kernels/cuda/move_vectors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace funcol::kernels::move_vectors_test {
namespace {

// Words with the size and alignment of CUDA's uint2 and uint4.
struct alignas(8) TwoWords {
  uint32_t words[2];
};
struct alignas(16) FourWords {
  uint32_t words[4];
};

template <Change kChange, typename Vector, typename Index>
void move_all(const void* in, void* out, const ShardShape& shape) {
  const MoveVectors<kChange, Vector, Index> move(in, out, shape);
  static_assert(std::is_trivially_copyable_v<MoveVectors<kChange, Vector, Index>>);  // as launches copy it
  for (Index i = 0; i < move.num_vectors; ++i) {
    move(i);
  }
}

struct Kernel {
  std::string name;
  int64_t vector_bytes;
  void (*merge)(const void*, void*, const ShardShape&);
  void (*split)(const void*, void*, const ShardShape&);
};

template <typename Vector, typename Index>
Kernel kernel() {
  return {"vectors_of_" + std::to_string(sizeof(Vector)) + "_indexes_of_" + std::to_string(sizeof(Index)),
          sizeof(Vector), move_all<Change::kMerge, Vector, Index>, move_all<Change::kSplit, Vector, Index>};
}

std::vector<Kernel> kernels() {
  return {kernel<uint8_t, uint32_t>(),  kernel<uint8_t, uint64_t>(),  kernel<uint16_t, uint32_t>(),
          kernel<uint16_t, uint64_t>(), kernel<uint32_t, uint32_t>(), kernel<uint32_t, uint64_t>(),
          kernel<TwoWords, uint32_t>(), kernel<TwoWords, uint64_t>(), kernel<FourWords, uint32_t>(),
          kernel<FourWords, uint64_t>()};
}

using Case = std::tuple<Kernel, int64_t, int64_t, int64_t>;  // vectors in a row, num_ranks, outer

class MoveVectorsOfAnyShape : public ::testing::TestWithParam<Case> {
 protected:
  using Memory = std::vector<FourWords>;  // aligned to every vector

  MoveVectorsOfAnyShape() : in_(memory()) {
    uint32_t state = 1;
    for (auto& vector : in_) {
      for (auto& word : vector.words) {
        word = state = state * 1664525U + 1013904223U;
      }
    }
  }

  // One vector more than the shape has, which stays as it is.
  Memory memory() const {
    constexpr uint32_t kGuard = 0xA5A5A5A5;
    return Memory(static_cast<size_t>(shape_.num_bytes()) / sizeof(FourWords) + 2,
                  FourWords{{kGuard, kGuard, kGuard, kGuard}});
  }

  template <typename Change>
  std::vector<uint32_t> changed(const Change& change) const {
    Memory out = memory();
    change(in_.data(), out.data());
    std::vector<uint32_t> words;
    for (const auto& vector : out) {
      words.insert(words.end(), std::begin(vector.words), std::end(vector.words));
    }
    return words;
  }

  const Kernel kernel_ = std::get<0>(GetParam());
  const ShardShape shape_ = {.num_ranks = std::get<2>(GetParam()),
                             .outer = std::get<3>(GetParam()),
                             .row_bytes = std::get<1>(GetParam()) * kernel_.vector_bytes};
  Memory in_;
};

TEST_P(MoveVectorsOfAnyShape, MergeEqualsTheCpuKernel) {
  EXPECT_EQ(changed([this](auto* in, auto* out) { kernel_.merge(in, out, shape_); }),
            changed([this](auto* in, auto* out) { merge_shards(in, out, shape_, 0, shape_.num_rows()); }));
}

TEST_P(MoveVectorsOfAnyShape, SplitEqualsTheCpuKernel) {
  EXPECT_EQ(changed([this](auto* in, auto* out) { kernel_.split(in, out, shape_); }),
            changed([this](auto* in, auto* out) { split_shards(in, out, shape_, 0, shape_.num_rows()); }));
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& param) {
  const auto& [kernel, row_vectors, num_ranks, outer] = param.param;
  return kernel.name + "_rows_of_" + std::to_string(row_vectors) + "_ranks_" + std::to_string(num_ranks) +
         "_outer_" + std::to_string(outer);
}

INSTANTIATE_TEST_SUITE_P(Sizes, MoveVectorsOfAnyShape,
                         ::testing::Combine(::testing::ValuesIn(kernels()), ::testing::Values(1, 2, 3, 7, 64),
                                            ::testing::Values(1, 2, 3, 8, 11),
                                            ::testing::Values(0, 1, 2, 7, 64)),
                         name_of_case);

class DividerBy : public ::testing::TestWithParam<uint32_t> {};

// At the ends of quotients, where a wrong reciprocal would show.
TEST_P(DividerBy, TheQuotientIsExactBelowTwoToThe31) {
  constexpr uint32_t kLast = std::numeric_limits<int32_t>::max();
  const uint32_t divisor = GetParam();
  const Divider<uint32_t> divider(divisor);
  const uint32_t last_quotient = kLast / divisor;
  for (const uint32_t quotient : {uint32_t{0}, uint32_t{1}, last_quotient / 2, last_quotient}) {
    const uint32_t first = quotient * divisor;
    EXPECT_EQ(divider.quotient(first), quotient);
    EXPECT_EQ(divider.quotient(first + std::min(divisor - 1, kLast - first)), quotient);
  }
}

INSTANTIATE_TEST_SUITE_P(Divisors, DividerBy,
                         ::testing::Values(1, 2, 3, 5, 7, 10, 11, 641, 65535, 65536, 65537, 1'000'003,
                                           (1U << 30) - 1, 1U << 30, (1U << 30) + 1, (1U << 31) - 1),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace funcol::kernels::move_vectors_test
