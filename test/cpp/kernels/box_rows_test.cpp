#include "kernels/box_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/move_boxes.h"

namespace funcol::kernels::box_rows_test {
namespace {

// Words with the size and alignment of CUDA's uint2 and uint4.
struct alignas(8) TwoWords {
  uint32_t words[2];
};
struct alignas(16) FourWords {
  uint32_t words[4];
};

constexpr size_t kBytes = 4096;

struct Memory {
  alignas(16) std::array<char, kBytes> bytes{};
};

// The copy as its definition says it.
void copy_by_rows(const RowBox& box) {
  for (int64_t plane = 0; plane < box.num_rows[0]; ++plane) {
    for (int64_t row = 0; row < box.num_rows[1]; ++row) {
      std::memcpy(
          static_cast<char*>(box.to) + plane * box.to_strides[0] + row * box.to_strides[1],
          static_cast<const char*>(box.from) + plane * box.from_strides[0] + row * box.from_strides[1],
          static_cast<size_t>(box.row_bytes));
    }
  }
}

template <typename Vector, typename Index>
void copy_as(const std::vector<RowBox>& boxes) {
  const MoveBoxes<Vector, Index> move(boxes.data(), boxes.size());
  static_assert(std::is_trivially_copyable_v<MoveBoxes<Vector, Index>>);  // as launches copy it
  static_assert(sizeof(move) <= 4096);
  for (Index i = move.count(); i-- > 0;) {  // in any sequence
    move(i);
  }
}

template <typename Index>
void copy_in_vectors_of(int64_t bytes, const std::vector<RowBox>& boxes) {
  switch (bytes) {
    case 16:
      return copy_as<FourWords, Index>(boxes);
    case 8:
      return copy_as<TwoWords, Index>(boxes);
    case 4:
      return copy_as<uint32_t, Index>(boxes);
    case 2:
      return copy_as<uint16_t, Index>(boxes);
    default:
      return copy_as<uint8_t, Index>(boxes);
  }
}

TEST(VectorBytes, AreTheWidestThatPointersRowsAndStridesShare) {
  const Memory memory;
  Memory target;
  RowBox box{memory.bytes.data(), target.bytes.data(), 32, {2, 3}, {192, 64}, {96, 32}};
  EXPECT_EQ(vector_bytes(box), 16);
  box.from = memory.bytes.data() + 4;
  EXPECT_EQ(vector_bytes(box), 4);
  box.from = memory.bytes.data();
  box.row_bytes = 6;
  EXPECT_EQ(vector_bytes(box), 2);
  box.row_bytes = 8;
  box.to_strides[1] = 9;
  EXPECT_EQ(vector_bytes(box), 1);
}

TEST(VectorBytes, DoNotDependOnStridesOfASingleRow) {
  const Memory memory;
  Memory target;
  EXPECT_EQ(vector_bytes({memory.bytes.data(), target.bytes.data(), 16, {1, 1}, {1, 3}, {5, 7}}), 16);
}

class BoxesOfAnyShape : public ::testing::TestWithParam<int> {};

// Boxes of other sizes in one launch, targets one behind the other with a gap of a unit.
TEST_P(BoxesOfAnyShape, AreCopiedAsTheirRowsAre) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const int64_t unit = int64_t{1} << draw(0, 4);
  Memory from;
  std::ranges::generate(from.bytes, [&] { return static_cast<char>(draw(0, 255)); });
  Memory expected;
  Memory narrow;
  Memory wide;
  struct Place {
    RowBox box;
    int64_t from;
    int64_t to;
  };
  std::vector<Place> places;
  int64_t filled = 0;
  while (places.size() < kMaxBoxes) {
    RowBox box;
    box.row_bytes = unit * draw(1, 3);
    box.num_rows = {draw(1, 3), draw(1, 4)};
    box.from_strides[1] = box.row_bytes + unit * draw(0, 2);
    box.from_strides[0] = box.from_strides[1] * box.num_rows[1] + unit * draw(0, 2);
    box.to_strides[1] = box.row_bytes + unit * draw(0, 1);
    box.to_strides[0] = box.to_strides[1] * box.num_rows[1];
    const int64_t read = box.from_strides[0] * box.num_rows[0];
    const int64_t written = box.to_strides[0] * box.num_rows[0];
    if (filled + written + unit > static_cast<int64_t>(kBytes)) {
      break;
    }
    places.push_back({box, draw(0, (static_cast<int64_t>(kBytes) - read) / unit) * unit, filled});
    filled += written + unit;
  }
  ASSERT_FALSE(places.empty());
  const auto boxes_into = [&](Memory& target) {
    std::vector<RowBox> boxes;
    for (const auto& place : places) {
      boxes.push_back(place.box);
      boxes.back().from = from.bytes.data() + place.from;
      boxes.back().to = target.bytes.data() + place.to;
    }
    return boxes;
  };
  std::ranges::for_each(boxes_into(expected), copy_by_rows);
  int64_t width = 16;
  for (const auto& box : boxes_into(narrow)) {
    width = std::min(width, vector_bytes(box));
  }
  EXPECT_GE(width, unit);
  copy_in_vectors_of<uint32_t>(width, boxes_into(narrow));
  copy_in_vectors_of<uint64_t>(width, boxes_into(wide));
  EXPECT_EQ(narrow.bytes, expected.bytes);
  EXPECT_EQ(wide.bytes, expected.bytes);
}

INSTANTIATE_TEST_SUITE_P(Seeds, BoxesOfAnyShape, ::testing::Range(0, 200));

}  // namespace
}  // namespace funcol::kernels::box_rows_test
