#include "planner/plan.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/search.h"
#include "planner/tasks.h"

namespace funcol::plan_test {
namespace {

using test::task_of;
using ::testing::Values;

const Mesh kNamed{{2, 4}, {"dp", "tp"}, {0b11}};
const Mesh kNumbered{{2, 4}, {}, {0b11}};

struct Printed {
  Mesh mesh;
  StepKind kind;
  AxisSet axes;
  std::string before;
  std::string after;
  std::string text;
};

void PrintTo(const Printed& printed, std::ostream* out) { *out << printed.text; }

class StepAsText : public ::testing::TestWithParam<Printed> {};

TEST_P(StepAsText, NamesItsKindItsSubjectAndItsAxes) {
  const auto& [mesh, kind, axes, before, after, text] = GetParam();
  Step step{kind, axes, test::layout_of({before}, mesh, 3), test::layout_of({after}, mesh, 3), {}};
  EXPECT_EQ(to_string(step, mesh), text);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, StepAsText,
    Values(Printed{kNamed, StepKind::kAllGather, 0b01, "S0,S1", "R,S1", "all_gather(dim 0, dp)"},
           Printed{kNumbered, StepKind::kAllGather, 0b10, "S0,S1", "S0,R", "all_gather(dim 1, 1)"},
           Printed{kNamed, StepKind::kAllGather, 0b11, "S2,S2", "R,R", "all_gather(dim 2, dp+tp)"},
           Printed{kNamed, StepKind::kAllToAll, 0b11, "S0,S0", "S1,S1", "all_to_all(dim 0 -> 1, dp+tp)"},
           Printed{kNumbered, StepKind::kAllToAll, 0b11, "S0,S0", "S1,S1", "all_to_all(dim 0 -> 1, 0+1)"},
           Printed{kNamed, StepKind::kSplit, 0b10, "R,R", "R,S1", "split(dim 1, tp)"},
           Printed{kNamed, StepKind::kAllReduce, 0b10, "S0,P", "S0,R", "all_reduce(sum, tp)"},
           Printed{kNamed, StepKind::kAllReduce, 0b11, "P(max),P(max)", "R,R", "all_reduce(max, dp+tp)"},
           Printed{kNamed, StepKind::kReduceScatter, 0b01, "P(avg),R", "S1,R",
                   "reduce_scatter(avg, dim 1, dp)"},
           Printed{kNamed, StepKind::kToPartial, 0b01, "R,R", "P,R", "to_partial(sum, dp)"},
           Printed{kNamed, StepKind::kEmbed, 0b01, "S0,R", "P,R", "embed(dim 0 -> sum, dp)"},
           Printed{kNamed, StepKind::kPermute, 0b11, "S0,S1", "S1,S0", "permute(dim 0, 1 -> 1, 0, dp+tp)"}));

struct Arrow {
  Mesh mesh;
  test::Sides src;
  test::Sides dst;
  std::string text;
};

void PrintTo(const Arrow& arrow, std::ostream* out) { *out << arrow.text; }

class PlanAsText : public ::testing::TestWithParam<Arrow> {};

TEST_P(PlanAsText, IsPyTorchsArrowNotation) {
  const auto& [mesh, src, dst, text] = GetParam();
  EXPECT_EQ(to_string(plan_redistribution(task_of(mesh, {8, 8}, src, dst), StepCounts{})), text);
}

const Mesh kApart{{2, 4}, {}, {}};

INSTANTIATE_TEST_SUITE_P(Plans, PlanAsText,
                         Values(Arrow{kApart, {"S0,R"}, {"S0,R"}, "S(0)R"},
                                Arrow{kApart, {"S0,R"}, {"R,R"}, "S(0)R->RR"},
                                Arrow{kApart, {"S0,S1"}, {"R,S1"}, "S(0)S(1)->RS(1)"},
                                Arrow{kApart, {"S0,S0"}, {"R,R"}, "S(0)[0]S(0)[1]->S(0)R->RR"},
                                Arrow{kNamed, {"S0,S0"}, {"R,R"}, "S(0)[0]S(0)[1]-->RR"},
                                Arrow{kNamed, {"P,P"}, {"S1,S1"}, "P(sum)P(sum)-->S(1)[0]S(1)[1]"},
                                Arrow{kApart, {"S0,S0", {{1, 0}}}, {"R,S0"}, "S(0)[1]S(0)[0]->RS(0)"}));

struct Held {
  std::vector<int64_t> mesh;
  test::Sides layout;
  std::vector<int64_t> shape;
  AxisSet axes;
  Coordinate coordinate;
  std::vector<int64_t> logical_shape;
};

void PrintTo(const Held& held, std::ostream* out) {
  *out << held.layout.placements << " over " << held.axes << " at " << test::joined(held.coordinate, ",");
}

class LogicalShape : public ::testing::TestWithParam<Held> {};

TEST_P(LogicalShape, IsWhatTheOtherAxesLeave) {
  const auto& [sizes, layout, shape, axes, coordinate, expected] = GetParam();
  const Mesh mesh{sizes, {}, {}};
  EXPECT_EQ(logical_shape(test::layout_of(layout, mesh, shape.size()), mesh, shape, axes, coordinate),
            expected);
}

INSTANTIATE_TEST_SUITE_P(WorkedCases, LogicalShape,
                         Values(Held{{2}, {"S0"}, {5, 3}, 0b1, {1}, {5, 3}},
                                Held{{2, 4}, {"S0,S1"}, {8, 8}, 0b01, {0, 0}, {8, 2}},
                                // 5 rows: 3 and 2.
                                Held{{2, 2}, {"S0,S0"}, {5, 3}, 0b10, {0, 0}, {3, 3}},
                                Held{{2, 2}, {"S0,S0"}, {5, 3}, 0b10, {1, 0}, {2, 3}},
                                Held{{2, 2}, {"S0,S0"}, {5, 3}, 0b11, {1, 1}, {5, 3}},
                                // 5 rows for 4 ranks: 2, 2, 1, 0.
                                Held{{4, 2}, {"S0,S1"}, {5, 3}, 0b10, {2, 1}, {1, 3}},
                                Held{{4, 2}, {"S0,S1"}, {5, 3}, 0b10, {3, 0}, {0, 3}},
                                Held{{4, 2}, {"S0,S1"}, {5, 3}, 0b01, {3, 1}, {5, 1}},
                                // tp cuts 7 rows into 4 and 3, dp those.
                                Held{{2, 2}, {"S0,S0", {{1, 0}}}, {7}, 0b01, {1, 1}, {3}},
                                // Pieces of 3, 3, 1 rows, of which rank 0 takes 2, 2, 1.
                                Held{{2, 2}, {"_S(0,3),S1"}, {7, 4}, 0b10, {0, 1}, {5, 4}},
                                Held{{2, 2}, {"P,S1"}, {7, 4}, 0b10, {1, 1}, {7, 4}}));

struct Gathered {
  std::string src;
  std::string dst;
  std::vector<std::vector<int64_t>> logical_shapes;  // of the steps
};

void PrintTo(const Gathered& gathered, std::ostream* out) { *out << gathered.src << " -> " << gathered.dst; }

class StepsOfAnUnevenTensor : public ::testing::TestWithParam<Gathered> {};

TEST_P(StepsOfAnUnevenTensor, KnowTheShapeThatTheirGroupHolds) {
  const Mesh mesh{{2, 2}, {}, {}};
  const Plan plan =
      greedy_redistribution(task_of(mesh, {5, 3}, {GetParam().src}, {GetParam().dst}), StepCounts{});
  std::vector<std::vector<int64_t>> shapes;
  shapes.reserve(plan.steps.size());
  for (const auto& step : plan.steps) {
    shapes.push_back(step.logical_shape);
  }
  EXPECT_EQ(shapes, GetParam().logical_shapes);
}

INSTANTIATE_TEST_SUITE_P(Steps, StepsOfAnUnevenTensor,
                         Values(Gathered{"S0,S0", "R,R", {{3, 3}, {5, 3}}},
                                Gathered{"S0,S1", "R,R", {{3, 3}, {5, 3}}},
                                Gathered{"R,R", "S0,S0", {{5, 3}, {3, 3}}},
                                Gathered{"P,S1", "S0,S1", {{5, 2}}}, Gathered{"S0,P", "S0,R", {{3, 3}}},
                                Gathered{"S0,S0", "S0,S1", {{3, 3}}}));

struct Bytes {
  std::string src;
  std::string dst;
  int64_t sent;
  int64_t peak;
};

void PrintTo(const Bytes& bytes, std::ostream* out) { *out << bytes.src << " -> " << bytes.dst; }

class StepOfBytes : public ::testing::TestWithParam<Bytes> {
 protected:
  // 8 x 8 elements of 4 bytes on 4 ranks.
  const Plan plan_ =
      plan_redistribution(task_of({{4}, {}, {}}, {8, 8}, {GetParam().src}, {GetParam().dst}), StepCounts{});
};

TEST_P(StepOfBytes, KnowsWhatTheBusiestRankSends) {
  ASSERT_EQ(plan_.steps.size(), 1U);
  EXPECT_EQ(plan_.steps.front().bytes_sent, GetParam().sent);
}

TEST_P(StepOfBytes, KnowsTheMostThatARankHolds) {
  ASSERT_EQ(plan_.steps.size(), 1U);
  EXPECT_EQ(plan_.steps.front().peak_bytes, GetParam().peak);
}

// Source, target, and a copy where the rows of ranks are not contiguous.
INSTANTIATE_TEST_SUITE_P(Steps, StepOfBytes,
                         Values(Bytes{"S0", "R", 192, 64 + 256}, Bytes{"S1", "R", 192, 64 + 256 + 256},
                                Bytes{"P", "S0", 192, 256 + 64}, Bytes{"P", "S1", 192, 256 + 64 + 256},
                                Bytes{"P", "R", 384, 256 + 256}, Bytes{"R", "S1", 0, 256 + 64},
                                Bytes{"R", "P", 0, 256 + 256}, Bytes{"S0", "P", 0, 64 + 256},
                                Bytes{"S0", "S1", 48, 64 + 64 + 64}));

}  // namespace
}  // namespace funcol::plan_test
