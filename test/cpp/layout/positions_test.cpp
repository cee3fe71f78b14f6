#include "layout/positions.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace funcol {
namespace {

using Runs = std::vector<PositionRun>;

std::vector<int64_t> positions(const Runs& runs) {
  std::vector<int64_t> each;
  for (const auto& run : runs) {
    EXPECT_EQ(run.local, runs.front().local + static_cast<int64_t>(each.size()));
    for (int64_t i = 0; i < run.size; ++i) {
      each.push_back(run.full + i);
    }
  }
  return each;
}

// Element by element.
std::vector<int64_t> expected(const std::vector<int64_t>& shape, const std::vector<ShardCut>& cuts) {
  std::vector<int64_t> found{0};
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    Intervals held;
    append(held, {0, shape[dim]});
    for (const auto& one : cuts) {
      if (one.dim == static_cast<int64_t>(dim)) {
        held = cut(held, one.num_ranks, one.index, one.split_factor);
      }
    }
    std::vector<int64_t> next;
    for (const int64_t before : found) {
      for (const auto& interval : held) {
        for (int64_t i = interval.begin; i < interval.end(); ++i) {
          next.push_back(before * shape[dim] + i);
        }
      }
    }
    found = std::move(next);
  }
  return found;
}

TEST(Positions, ColumnsOfARankAreARunEachRow) {
  const Positions columns({3, 4}, {{1, 2, 1, 1}});
  EXPECT_EQ(columns.runs(0, columns.numel()), (Runs{{0, 2, 2}, {2, 6, 2}, {4, 10, 2}}));
}

TEST(Positions, RowsOfARankAreOneRun) {
  const Positions rows({5, 2, 3}, {{0, 2, 1, 1}});
  EXPECT_EQ(rows.runs(0, rows.numel()), (Runs{{0, 18, 12}}));
}

TEST(Positions, ANumberIsOneElement) {
  const Positions number({}, {});
  EXPECT_EQ(number.runs(0, number.numel()), (Runs{{0, 0, 1}}));
}

struct Case {
  std::vector<int64_t> shape;
  std::vector<ShardCut> cuts;
};

class AllCuts : public testing::TestWithParam<Case> {};

TEST_P(AllCuts, RunsHaveThePositionsOfTheElements) {
  const auto& [shape, cuts] = GetParam();
  const Positions held(shape, cuts);
  const auto all = expected(shape, cuts);
  const auto numel = static_cast<int64_t>(all.size());
  ASSERT_EQ(held.numel(), numel);
  for (int64_t begin = 0; begin <= numel; ++begin) {
    for (int64_t end = begin; end <= numel; ++end) {
      EXPECT_EQ(positions(held.runs(begin, end)),
                std::vector<int64_t>(all.begin() + begin, all.begin() + end));
    }
  }
}

// The position in the full tensor of each element of the shard, -1 where no box has it.
std::vector<int64_t> positions(const std::vector<PositionBox>& boxes, int64_t numel) {
  std::vector<int64_t> full(static_cast<size_t>(numel), -1);
  for (const auto& box : boxes) {
    std::vector<std::pair<int64_t, int64_t>> elements{{box.local, box.full}};
    for (const auto& dim : box.dims) {
      std::vector<std::pair<int64_t, int64_t>> next;
      for (const auto& [in_shard, in_full] : elements) {
        for (int64_t i = 0; i < dim.size; ++i) {
          next.emplace_back(in_shard + i * dim.local_stride, in_full + i * dim.full_stride);
        }
      }
      elements = std::move(next);
    }
    for (const auto& [in_shard, in_full] : elements) {
      EXPECT_EQ(full.at(static_cast<size_t>(in_shard)), -1);
      full.at(static_cast<size_t>(in_shard)) = in_full;
    }
  }
  return full;
}

TEST_P(AllCuts, BoxesHaveThePositionsOfTheElements) {
  const auto& [shape, cuts] = GetParam();
  const Positions held(shape, cuts);
  EXPECT_EQ(positions(held.boxes(), held.numel()), expected(shape, cuts));
}

TEST(Positions, ABoxJoinsDimsThatAreNotCut) {
  const Positions middle({5, 3, 4, 2}, {{2, 2, 1, 1}});
  EXPECT_EQ(middle.boxes(), (std::vector<PositionBox>{{0, 4, {{15, 4, 8}, {4, 1, 1}}}}));
  const Positions rows({5, 3, 4}, {{0, 2, 1, 1}});
  EXPECT_EQ(rows.boxes(), (std::vector<PositionBox>{{0, 36, {{24, 1, 1}}}}));
}

INSTANTIATE_TEST_SUITE_P(
    Positions, AllCuts,
    testing::Values(Case{{4, 3}, {}}, Case{{7}, {{0, 3, 2, 1}}}, Case{{5, 3}, {{0, 2, 1, 1}, {0, 2, 0, 1}}},
                    Case{{5, 3, 4}, {{1, 2, 1, 1}}}, Case{{5, 3, 4}, {{0, 2, 1, 1}, {2, 3, 1, 1}}},
                    Case{{8, 3}, {{0, 2, 1, 2}}}, Case{{3, 7, 2}, {{1, 2, 1, 3}, {0, 2, 0, 1}}},
                    Case{{2, 3}, {{0, 4, 3, 1}}}, Case{{0, 3}, {{1, 2, 0, 1}}}));

}  // namespace
}  // namespace funcol
