// Which composition is preferred, and which compositions are legal, case by case.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/tasks.h"
#include "propagation/calls.h"
#include "propagation/composition_search.h"
#include "support/refuses.h"

namespace funcol::choice_test {
namespace {

using test::row;
using test::rows_from_texts;
using test::tensor;
using ::testing::Values;

struct Input {
  test::Sides at;
  std::vector<int64_t> shape = {24, 24};
  bool is_pinned = false;
};

struct Worked {
  std::string name;
  std::vector<int64_t> mesh;
  Rows rows;
  std::vector<Input> inputs;
  std::string expected;  // layouts of the output and the inputs: "R <- R, R"; "none"
  std::vector<std::optional<test::Sides>> required = {};
};

void PrintTo(const Worked& worked, std::ostream* out) { *out << worked.name; }

std::string to_string(const Composition& composition) {
  std::string text;
  for (const auto& output : composition.outputs) {
    text += (text.empty() ? "" : ", ") + (output ? funcol::to_string(*output) : "-");
  }
  std::string inputs;
  for (const auto& input : composition.inputs) {
    inputs += (inputs.empty() ? "" : ", ") + funcol::to_string(input);
  }
  return text + " <- " + inputs;
}

// A call whose only output is as long as its first input.
class Call {
 public:
  explicit Call(const Worked& worked) : rows_(worked.rows), mesh_{worked.mesh, {}, {}} {
    call_.op = "test::op";
    for (const auto& input : worked.inputs) {
      call_.tensors.push_back(tensor(input.shape));
      operands_.push_back({test::layout_of(input.at, mesh_, input.shape.size()), input.is_pinned});
    }
    call_.outputs.emplace_back(call_.tensors.front());
    for (const auto& sides : worked.required) {
      required_.push_back(sides ? std::optional(test::layout_of(*sides, mesh_, 2)) : std::nullopt);
    }
  }

  std::optional<PricedComposition> choice(const CostModel& model = StepCounts{}) const {
    SearchPool costs(mesh_, model);
    return cheapest_composition(call_, rows_, operands_, required_, costs);
  }

  std::vector<PricedComposition> choices(const CostModel& model = StepCounts{}) const {
    SearchPool costs(mesh_, model);
    return legal_compositions(call_, rows_, operands_, required_, costs);
  }

 private:
  OpCall call_;
  Rows rows_;
  Mesh mesh_;
  std::vector<Operand> operands_;
  std::vector<std::optional<Layout>> required_;
};

class WorkedChoice : public ::testing::TestWithParam<Worked> {};

TEST_P(WorkedChoice, IsMade) {
  const auto choice = Call(GetParam()).choice();
  EXPECT_EQ(choice ? to_string(choice->composition) : "none", GetParam().expected);
}

std::string name_of(const ::testing::TestParamInfo<Worked>& info) { return info.param.name; }

const Rows kAdd = rows_from_texts({"S0 <- S0,S0", "S1 <- S1,S1", "P <- P,P"});
const Rows kMatmul = rows_from_texts({"S0 <- S0,R", "S1 <- R,S1", "P <- S1,S0", "P <- P,R", "P <- R,P"});
const Rows kSame = rows_from_texts({"S0 <- S0", "S1 <- S1", "P <- P"});

INSTANTIATE_TEST_SUITE_P(
    Preference, WorkedChoice,
    Values(
        Worked{"NothingMoves", {2, 2}, kMatmul, {{{"S0,R"}}, {{"R,S1"}}}, "S(0)S(1) <- S(0)R, RS(1)"},
        Worked{"NothingMovesBeforeWhatIsFree",
               {2},
               rows_from_texts({"S0 <- S0,S0", "S0 <- R,S0"}),
               {{{"R"}}, {{"S0"}}},
               "S(0) <- R, S(0)"},
        Worked{"NothingMovesBeforeReplicateOnOneRank", {1}, kSame, {{{"S1"}}}, "S(1) <- S(1)"},
        Worked{"TheFirstInWhichNothingMoves",
               {2},
               rows_from_texts({"P <- S0", "S0 <- S0"}),
               {{{"S0"}}},
               "P(sum) <- S(0)"},
        Worked{"FreeBeforeWhatCosts", {2}, kAdd, {{{"R"}}, {{"S1"}}}, "S(1) <- S(1), S(1)"},
        Worked{"TheLeast", {2}, kMatmul, {{{"S0"}}, {{"S0"}}}, "P(sum) <- S(1), S(0)"},
        Worked{
            "OfEqualsTheFirstRow", {2}, rows_from_texts({"S1 <- S1", "S0 <- S0"}), {{{"P"}}}, "S(1) <- S(1)"},
        Worked{"OfEqualsTheFirstRowOfTheFirstAxis",
               {2, 2},
               rows_from_texts({"S1 <- S1,S0", "S0 <- S0,S1"}),
               {{{"R,R"}}, {{"S1,S0"}}},
               "S(0)S(1) <- S(0)S(1), S(1)S(0)"},
        Worked{"OfEqualFirstAxesTheFirstRowOfTheSecond",
               {2, 2},
               rows_from_texts({"S0 <- S0", "S1 <- S1"}),
               {{{"P,P"}}},
               "S(0)[0]S(0)[1] <- S(0)[0]S(0)[1]"},
        Worked{"OfEqualsOnOneRankReplicate", {1}, rows_from_texts({"S0 <- S0"}), {{{"P"}}}, "R <- R"},
        Worked{"ReplicatesComeFirstWhereverTheyAreListed",
               {1},
               rows_from_texts({"S0 <- S0", "R <- R"}),
               {{{"P"}}},
               "R <- R"}),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    Rows, WorkedChoice,
    Values(Worked{"WithADimThatATensorLacksArePassedOver",
                  {2},
                  rows_from_texts({"S1 <- S1", "S0 <- S0"}),
                  {{{"P"}, {8}}},
                  "S(0) <- S(0)"},
           Worked{"MakeNoPartialOfAShard", {2}, kAdd, {{{"P"}}, {{"S0"}}}, "S(0) <- S(0), S(0)"},
           Worked{"MakeNoPartialOfAnother",
                  {2},
                  rows_from_texts({"P(avg) <- P(avg),P(avg)", "S0 <- S0,S0"}),
                  {{{"P(avg)"}}, {{"P"}}},
                  "S(0) <- S(0), S(0)"},
           Worked{"MakeAPartialOfAReplicate", {2}, kAdd, {{{"P"}}, {{"R"}}}, "P(sum) <- P(sum), P(sum)"},
           Worked{"NeverMixPartialsThatDoNotCommute",
                  {2, 2},
                  rows_from_texts({"P <- S0", "P(max) <- S1"}),
                  {{{"S0,S1"}}},
                  "P(sum)P(sum) <- S(0)[0]S(0)[1]"},
           Worked{"MixPartialsThatCommute",
                  {2, 2},
                  rows_from_texts({"P <- S0", "P(avg) <- S1"}),
                  {{{"S0,S1"}}},
                  "P(sum)P(avg) <- S(0)S(1)"},
           Worked{"MixAnyPartialsOnOneRank",
                  {2, 1},
                  rows_from_texts({"P <- S0", "P(max) <- S1"}),
                  {{{"S0,S1"}}},
                  "P(sum)P(max) <- S(0)S(1)"},
           Worked{"OfAnyShardFollowTheInputs",
                  {2, 2},
                  rows_from_texts({"S0* <- S0*,S0*"}),
                  {{{"_S(0,2),S0"}}, {{"_S(0,2),S0"}}},
                  "_S(0, 2)[0]S(0)[1] <- _S(0, 2)[0]S(0)[1], _S(0, 2)[0]S(0)[1]"},
           Worked{"OfAnyShardCutAllAlike",
                  {2},
                  rows_from_texts({"S0* <- S0*,S0*"}),
                  {{{"_S(0,2)"}}, {{"R"}}},
                  "_S(0, 2) <- _S(0, 2), _S(0, 2)"},
           Worked{"OfPlainShardsAreNotStrided",
                  {2},
                  rows_from_texts({"S0 <- S0,S0"}),
                  {{{"_S(0,2)"}}, {{"S0"}}},
                  "S(0) <- S(0), S(0)"}),
    name_of);

const ShardOrder kInverse = {{1, 0}};

INSTANTIATE_TEST_SUITE_P(Orders, WorkedChoice,
                         Values(Worked{"OfAllInputsStay",
                                       {2, 2},
                                       kAdd,
                                       {{{"S0,S0", kInverse}}, {{"S0,S0", kInverse}}},
                                       "S(0)[1]S(0)[0] <- S(0)[1]S(0)[0], S(0)[1]S(0)[0]"},
                                Worked{"ThatContradictEachOtherMoveTheFewer",
                                       {2, 2},
                                       rows_from_texts({"S0 <- S0,S0,S0"}),
                                       {{{"S0,S0"}}, {{"S0,S0", kInverse}}, {{"S0,S0", kInverse}}},
                                       "S(0)[1]S(0)[0] <- S(0)[1]S(0)[0], S(0)[1]S(0)[0], S(0)[1]S(0)[0]"},
                                Worked{"OfEqualCostAreTheMeshs",
                                       {2, 2},
                                       rows_from_texts({"S0 <- S0,S0"}),
                                       {{{"S0,S0", kInverse}}, {{"S0,S0"}}},
                                       "S(0)[0]S(0)[1] <- S(0)[0]S(0)[1], S(0)[0]S(0)[1]"},
                                Worked{"OfSeveralInputsAreJoined",
                                       {2, 2, 2},
                                       rows_from_texts({"S0 <- S0,R", "S0 <- S0,S0", "S0 <- R,S0"}),
                                       {{{"S0,S0,R", kInverse}}, {{"R,S0,S0", {{2, 1}}}}},
                                       "S(0)[2]S(0)[1]S(0)[0] <- S(0)[1]S(0)[0]R, RS(0)[1]S(0)[0]"},
                                Worked{"OfInputsCutInTheMeshsOrderCount",
                                       {2, 2, 2},
                                       rows_from_texts({"S0 <- S0,R", "S0 <- S0,S0", "S0 <- R,S0"}),
                                       {{{"S0,S0,R"}}, {{"S0,R,S0", {{2, 0}}}}},
                                       "S(0)[1]S(0)[2]S(0)[0] <- S(0)[0]S(0)[1]R, S(0)[1]RS(0)[0]"}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(
    InPlace, WorkedChoice,
    Values(Worked{"TheOthersMove",
                  {2},
                  kAdd,
                  {{{"S0"}, {24, 24}, true}, {{"S1"}}},
                  "S(0) <- S(0), S(0)",
                  {{{"S0"}}}},
           Worked{"EvenIfThatCostsMore",
                  {2, 2},
                  rows_from_texts({"S0 <- S0,S0,S0"}),
                  {{{"S0,S0"}, {24, 24}, true}, {{"S0,S0", kInverse}}, {{"S0,S0", kInverse}}},
                  "S(0)[0]S(0)[1] <- S(0)[0]S(0)[1], S(0)[0]S(0)[1], S(0)[0]S(0)[1]"},
           Worked{"OrderOfCutsIsKept",
                  {2, 2},
                  kAdd,
                  {{{"S0,S0", kInverse}, {24, 24}, true}, {{"R,R"}}},
                  "S(0)[1]S(0)[0] <- S(0)[1]S(0)[0], S(0)[1]S(0)[0]"},
           Worked{"NothingFits", {2}, kAdd, {{{"S0"}, {24, 24}, true}, {{"S1"}, {24, 24}, true}}, "none"},
           Worked{"TheResultHasTheRequiredLayout", {2}, kSame, {{{"P"}}}, "S(1) <- S(1)", {{{"S1"}}}},
           Worked{"TheResultHasTheRequiredOrder",
                  {2, 2},
                  kSame,
                  {{{"P,P"}}},
                  "S(0)[1]S(0)[0] <- S(0)[1]S(0)[0]",
                  {{{"S0,S0", kInverse}}}},
           Worked{"TheResultIsNotRequired", {2}, kSame, {{{"S0"}}}, "S(0) <- S(0)", {std::nullopt}},
           Worked{"NoRowGivesTheRequiredResult",
                  {2},
                  rows_from_texts({"S0 <- S0"}),
                  {{{"S0"}}},
                  "none",
                  {{{"S1"}}}}),
    name_of);

const Rows kEmptyToo = rows_from_texts({"S0 <- S0"}, true);
const Rows kNeverEmpty = rows_from_texts({"S0 <- S0"});

INSTANTIATE_TEST_SUITE_P(
    EmptyShards, WorkedChoice,
    Values(
        Worked{"Move", {4}, kNeverEmpty, {{{"S0"}, {3, 2}}}, "R <- R"},
        Worked{"OfMoreRowsThanRanksMove", {4}, kNeverEmpty, {{{"S0"}, {5, 2}}}, "R <- R"},
        Worked{"OfTheSecondAxisMove", {2, 2}, kNeverEmpty, {{{"S0,S0"}, {3, 2}}}, "S(0)R <- S(0)R"},
        Worked{"OfTheLastChunkAloneMove", {3, 2}, kNeverEmpty, {{{"S0,S0"}, {7, 2}}}, "S(0)R <- S(0)R"},
        Worked{
            "OfStridedShardsMove", {4}, rows_from_texts({"S0* <- S0*"}), {{{"_S(0,2)"}, {6, 2}}}, "R <- R"},
        Worked{"OfNothingMove", {2}, kNeverEmpty, {{{"S0"}, {0, 2}}}, "R <- R"},
        Worked{"OfNothingOnOneRankMove", {1}, kNeverEmpty, {{{"S0"}, {0, 2}}}, "R <- R"},
        Worked{"MayBe", {4}, kEmptyToo, {{{"S0"}, {3, 2}}}, "S(0) <- S(0)"},
        Worked{"AreNotUnevenOnes", {4}, kNeverEmpty, {{{"S0"}, {7, 2}}}, "S(0) <- S(0)"},
        Worked{"AreNotThoseOfAnotherDim",
               {4},
               rows_from_texts({"S1 <- S1"}),
               {{{"S1"}, {0, 4}}},
               "S(1) <- S(1)"}),
    name_of);

Rows with_legality(Rows rows, decltype(Rows::is_legal) is_legal) {
  rows.is_legal = std::move(is_legal);
  return rows;
}

const auto kNotFirstDim = [](const OpCall&, const Composition& composition, const Mesh&) {
  return composition.inputs.front().axes_of(0).empty();
};

INSTANTIATE_TEST_SUITE_P(
    Legality, WorkedChoice,
    Values(Worked{"TakesTheNextBest", {2}, with_legality(kSame, kNotFirstDim), {{{"S0"}}}, "S(1) <- S(1)"},
           Worked{"KeepsWhatIsLegal", {2}, with_legality(kSame, kNotFirstDim), {{{"S1"}}}, "S(1) <- S(1)"},
           Worked{"MayRejectAll",
                  {2, 2},
                  with_legality(kSame, [](const OpCall&, const Composition&, const Mesh&) { return false; }),
                  {{{"S0,S1"}}},
                  "none"}),
    name_of);

Placement mask(uint64_t number) { return Placement::partial(PartialOp::kSum, number); }

Rows masks_from_shards() {
  return {{{{mask(1)}, {Placement::shard(0)}}, {{mask(2)}, {Placement::shard(1)}}}, false, {}};
}

INSTANTIATE_TEST_SUITE_P(
    Masks, WorkedChoice,
    Values(Worked{"AreMade", {2}, masks_from_shards(), {{{"S0"}}}, "MaskP(sum) <- S(0)"},
           Worked{"AreNotOnTwoAxes", {2, 2}, masks_from_shards(), {{{"S0,S0"}}}, "MaskP(sum)R <- S(0)R"},
           Worked{"AreNotOnAnAxisOfOneRankBesides",
                  {1, 2},
                  masks_from_shards(),
                  {{{"S0,S0"}}},
                  "RMaskP(sum) <- RS(0)"},
           Worked{"AreMadeOfWhatIsWhole",
                  {2, 2},
                  rows_from_texts({"M <- S0,M", "S1 <- S1,R"}),
                  {{{"S0,S1"}}, {{"R,R"}}},
                  "MaskP(sum)S(1) <- S(0)S(1), MaskP(sum)R"},
           Worked{
               "AreNotMadeOfShards", {2}, rows_from_texts({"M <- S0,M"}), {{{"S0"}}, {{"S0"}}}, "R <- R, R"}),
    name_of);

class MaskedInput : public ::testing::Test {
 protected:
  std::optional<PricedComposition> choice(const std::vector<Placement>& source, const Rows& rows,
                                          const std::vector<std::optional<Layout>>& required = {}) const {
    SearchPool costs(mesh_, StepCounts{});
    const OpCall call{"test::op", {}, {tensor({24, 24})}, {tensor({24, 24})}};
    return cheapest_composition(call, rows, {{make_layout("test", source, {}, mesh_, 2)}}, required, costs);
  }

  const Mesh mesh_{{2, 2}, {}, {}};
  const Rows rows_{{{{mask(1)}, {mask(1)}}, {{Placement::shard(0)}, {Placement::shard(0)}}}, false, {}};
};

TEST_F(MaskedInput, StaysWhereItIs) {
  EXPECT_EQ(to_string(choice({Placement::replicate(), mask(1)}, rows_)->composition),
            "RMaskP(sum) <- RMaskP(sum)");
}

TEST_F(MaskedInput, IsReducedIfNoRowTakesIt) {
  EXPECT_EQ(to_string(choice({Placement::replicate(), mask(2)}, rows_)->composition), "RS(0) <- RS(0)");
}

TEST_F(MaskedInput, NeverKeepsItsMaskWhileItMoves) {
  const auto required = make_layout("test", {Placement::shard(0), mask(1)}, {}, mesh_, 2);
  EXPECT_FALSE(choice({Placement::replicate(), mask(1)}, rows_, {required}).has_value());
}

struct Large {
  std::string name;
  int64_t num_axes;
  size_t num_inputs;
  bool alike;
};

void PrintTo(const Large& large, std::ostream* out) { *out << large.name; }

// cat of 3-dim tensors along dim 0, sharded so that all of them have to move.
class LargeCall : public ::testing::TestWithParam<Large> {
 protected:
  LargeCall() {
    const auto& [name, num_axes, num_inputs, alike] = GetParam();
    const std::vector<Placement> cut(num_axes, Placement::shard(0));
    call_.op = name;
    for (size_t i = 0; i < num_inputs; ++i) {
      call_.tensors.push_back(tensor({alike ? 48 : static_cast<int64_t>(i) + 1, 48, 32}));
      operands_.push_back({make_layout("test", cut, {}, mesh_, 3)});
    }
    call_.outputs.emplace_back(tensor({48, 48, 32}));
    for (const auto& placement : parse_placements("S1,S2,P,P(avg)")) {
      rows_.rows.push_back({{placement}, std::vector<Placement>(num_inputs, placement)});
    }
  }

  const Mesh mesh_{std::vector<int64_t>(GetParam().num_axes, 2), {}, {}};
  OpCall call_;
  Rows rows_;
  std::vector<Operand> operands_;
};

double total(const PricedComposition& choice) {
  return std::accumulate(choice.costs.begin(), choice.costs.end(), 0.0);
}

TEST_P(LargeCall, CostsTheLeastOfAllChoices) {
  SearchPool costs(mesh_);
  double least = std::numeric_limits<double>::infinity();
  for (const auto& choice : legal_compositions(call_, rows_, operands_, {}, costs)) {
    least = std::min(least, total(choice));
  }
  EXPECT_NEAR(total(*cheapest_composition(call_, rows_, operands_, {}, costs)), least, 1e-9 * least);
}

TEST_P(LargeCall, SearchesOnceForInputsThatAreAlike) {
  SearchPool costs(mesh_);
  cheapest_composition(call_, rows_, operands_, {}, costs);
  EXPECT_EQ(costs.num_idle(), GetParam().alike ? 1 : GetParam().num_inputs);
}

INSTANTIATE_TEST_SUITE_P(Calls, LargeCall,
                         Values(Large{"Wide", 2, 120, true}, Large{"WideOfManyShapes", 2, 120, false},
                                Large{"Deep", 4, 2, true}, Large{"DeepOfManyShapes", 4, 3, false}),
                         [](const auto& param) { return param.param.name; });

TEST(Choice, OfInputsThatStayWhereTheyAreIsNotPriced) {
  const Mesh mesh{{2, 2}, {}, {}};
  SearchPool costs(mesh);
  const OpCall call{"test::op", {}, {tensor({8, 8})}, {tensor({8, 8})}};
  cheapest_composition(call, kSame, {{test::layout_of({"S0,S1"}, mesh, 2)}}, {}, costs);
  EXPECT_EQ(costs.num_idle(), 0);
}

TEST(Choice, SaysWhatEachInputCosts) {
  const Call call({"", {2}, kAdd, {{{"S0"}}, {{"S1"}}}, ""});
  EXPECT_EQ(call.choice()->costs, (std::vector<double>{0, 1}));
}

class WhetherSomethingMoves : public ::testing::TestWithParam<std::pair<std::string, bool>> {};

TEST_P(WhetherSomethingMoves, IsSaid) {
  const Call call({"", {2}, kAdd, {{{GetParam().first}}, {{"S0"}}}, ""});
  EXPECT_EQ(call.choice()->moves, GetParam().second);
}

INSTANTIATE_TEST_SUITE_P(Sources, WhetherSomethingMoves,
                         Values(std::pair{"S0", false}, std::pair{"S1", true}, std::pair{"R", true}));

TEST(Choice, HasNoLayoutForAnOutputThatIsNoTensor) {
  const Mesh mesh{{2}, {}, {}};
  SearchPool costs(mesh);
  const OpCall call{"test::op", {}, {tensor({8})}, {tensor({8}), std::nullopt}};
  const Rows rows{{{{Placement::shard(0), std::nullopt}, {Placement::shard(0)}}}, false, {}};
  const auto choice = cheapest_composition(call, rows, {{test::layout_of({"S0"}, mesh, 1)}}, {}, costs);
  EXPECT_EQ(to_string(choice->composition), "S(0), - <- S(0)");
}

TEST(Choice, OfACallWithoutTensorsReplicates) {
  const Mesh mesh{{2}, {}, {}};
  SearchPool costs(mesh);
  EXPECT_EQ(
      to_string(cheapest_composition({"aten::ones", {}, {}, {tensor({8})}}, {}, {}, {}, costs)->composition),
      "R <- ");
}

struct Refused {
  std::string name;
  Rows rows;
  size_t num_operands;
  int64_t num_axes;
  std::vector<std::optional<Layout>> required;
  std::string says;
};

void PrintTo(const Refused& refused, std::ostream* out) { *out << refused.name; }

class RefusedCall : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedCall, SaysWhatWasExpected) {
  const Refused& refused = GetParam();
  SearchPool costs({{2}, {}, {}});
  const OpCall call{"test::op", {}, {tensor({8, 8})}, {tensor({8, 8})}};
  const Layout layout{std::vector<Placement>(refused.num_axes), {}};
  const std::vector<Operand> operands(refused.num_operands, {layout});
  EXPECT_TRUE(
      test::refuses([&] { cheapest_composition(call, refused.rows, operands, refused.required, costs); },
                    {"test::op: ", refused.says, "expected 1"}));
}

INSTANTIATE_TEST_SUITE_P(
    Numbers, RefusedCall,
    Values(Refused{"Operands", kSame, 2, 1, {}, "2 operands"},
           Refused{"RowInputs", kAdd, 1, 1, {}, "2 inputs in a row"},
           Refused{"RowOutputs", rows_from_texts({"S0,S0 <- S0"}), 1, 1, {}, "2 outputs in a row"},
           Refused{"Axes", kSame, 1, 2, {}, "2 placements of an operand"},
           Refused{"Required", kSame, 1, 1, {std::nullopt, std::nullopt}, "2 required layouts"},
           Refused{"RequiredAxes",
                   kSame,
                   1,
                   1,
                   {Layout{std::vector<Placement>(2), {}}},
                   "2 placements of a required layout"}),
    [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace funcol::choice_test
