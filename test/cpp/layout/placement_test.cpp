#include "layout/placement.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "support/refuses.h"

namespace funcol::placement_test {
namespace {

using ::testing::Values;

const Placement kR = Placement::replicate();

struct Written {
  std::string text;
  Placement placement;
};

void PrintTo(const Written& written, std::ostream* out) { *out << written.text; }

class PlacementAsText : public ::testing::TestWithParam<Written> {};

TEST_P(PlacementAsText, IsPrintedAsPyTorchPrintsIt) {
  EXPECT_EQ(to_string(GetParam().placement), GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    AllKinds, PlacementAsText,
    Values(Written{"R", kR}, Written{"S(0)", Placement::shard(0)}, Written{"S(12)", Placement::shard(12)},
           Written{"S(-1)", Placement::shard(-1)}, Written{"_S(0, 2)", Placement::shard(0, 2)},
           Written{"_S(3, 16)", Placement::shard(3, 16)}, Written{"P(sum)", Placement::partial()},
           Written{"P(avg)", Placement::partial(PartialOp::kAvg)},
           Written{"MaskP(sum)", Placement::partial(PartialOp::kSum, 1)},
           Written{"MaskP(max)", Placement::partial(PartialOp::kMax, 7)},
           Written{"_NormP(2)", Placement::norm_partial({2, true})},
           Written{"_NormP(2.0)", Placement::norm_partial({2, false})},
           Written{"_NormP(0.3)", Placement::norm_partial({0.3, false})},
           Written{"_NormP(-100000.0)", Placement::norm_partial({-1e5, false})},
           Written{"_NormP(1e-05)", Placement::norm_partial({1e-5, false})},
           Written{"_NormP(1e+16)", Placement::norm_partial({1e16, false})}));

class PartialOpAsText : public ::testing::TestWithParam<std::tuple<PartialOp, std::string>> {};

TEST_P(PartialOpAsText, IsPyTorchsName) {
  EXPECT_EQ(to_string(std::get<0>(GetParam())), std::get<1>(GetParam()));
}

TEST_P(PartialOpAsText, IsReadBack) {
  EXPECT_EQ(partial_op(std::get<1>(GetParam())), std::get<0>(GetParam()));
}

TEST_P(PartialOpAsText, IsReadBackInAPlacement) {
  const auto placement = Placement::partial(std::get<0>(GetParam()));
  EXPECT_EQ(parse_placements(to_string(placement)), std::vector{placement});
}

INSTANTIATE_TEST_SUITE_P(AllOps, PartialOpAsText,
                         Values(std::tuple{PartialOp::kSum, "sum"}, std::tuple{PartialOp::kAvg, "avg"},
                                std::tuple{PartialOp::kMin, "min"}, std::tuple{PartialOp::kMax, "max"},
                                std::tuple{PartialOp::kProduct, "product"},
                                std::tuple{PartialOp::kBand, "band"}, std::tuple{PartialOp::kBor, "bor"},
                                std::tuple{PartialOp::kBxor, "bxor"}));

struct Read {
  std::string text;
  std::vector<Placement> placements;
};

void PrintTo(const Read& read, std::ostream* out) { *out << '"' << read.text << '"'; }

class PlacementsFromText : public ::testing::TestWithParam<Read> {};

TEST_P(PlacementsFromText, AreOneForEachWord) {
  EXPECT_EQ(parse_placements(GetParam().text), GetParam().placements);
}

INSTANTIATE_TEST_SUITE_P(
    Spellings, PlacementsFromText,
    Values(Read{"R", {kR}}, Read{"S0", {Placement::shard(0)}}, Read{"S(0)", {Placement::shard(0)}},
           Read{"S( 10 )", {Placement::shard(10)}}, Read{"S-1", {Placement::shard(-1)}},
           Read{"S(-2)", {Placement::shard(-2)}}, Read{"P", {Placement::partial()}},
           Read{"P(sum)", {Placement::partial()}}, Read{"P( max )", {Placement::partial(PartialOp::kMax)}},
           Read{"_S(0, 2)", {Placement::shard(0, 2)}}, Read{"_S(1,3)", {Placement::shard(1, 3)}},
           Read{"S0,R", {Placement::shard(0), kR}}, Read{" S(0) , R ", {Placement::shard(0), kR}},
           Read{"S(0), P(max)", {Placement::shard(0), Placement::partial(PartialOp::kMax)}},
           Read{"_S(0, 2),P", {Placement::shard(0, 2), Placement::partial()}},
           Read{"R,\tR,R", {kR, kR, kR}}));

struct Unreadable {
  std::string text;
  std::string word;
};

void PrintTo(const Unreadable& unreadable, std::ostream* out) { *out << '"' << unreadable.text << '"'; }

class UnreadablePlacements : public ::testing::TestWithParam<Unreadable> {};

TEST_P(UnreadablePlacements, AreRefusedByTheirWord) {
  EXPECT_TRUE(test::refuses(
      [] { parse_placements(GetParam().text); },
      {"'" + GetParam().word + "' is not a placement", "Write R, S(dim)", "one for each mesh axis"}));
}

INSTANTIATE_TEST_SUITE_P(Words, UnreadablePlacements,
                         Values(Unreadable{"", ""}, Unreadable{"R,", ""}, Unreadable{"R,,R", ""},
                                Unreadable{"X", "X"}, Unreadable{"RR", "RR"}, Unreadable{"r", "r"},
                                Unreadable{"S", "S"}, Unreadable{"S()", "S()"}, Unreadable{"S(", "S("},
                                Unreadable{"S(0", "S(0"}, Unreadable{"R,Sx", "Sx"},
                                Unreadable{"S(0x)", "S(0x)"}, Unreadable{"S1.5", "S1.5"},
                                Unreadable{"S99999999999999999999", "S99999999999999999999"},
                                Unreadable{"_S(0)", "_S(0)"}, Unreadable{"_S(0,)", "_S(0,)"},
                                Unreadable{"R,_S(0,2,3)", "_S(0,2,3)"}, Unreadable{"P(sum", "P(sum"}));

TEST(Placements, WithAnUnknownReductionAreRefusedWithTheOnesThereAre) {
  EXPECT_TRUE(test::refuses([] { parse_placements("S0,P(mean)"); },
                            {"'mean' is not a reduction", "sum, avg, min, max, product, band, bor, bxor"}));
}

class PairOfReductions : public ::testing::TestWithParam<std::tuple<PartialOp, PartialOp>> {};

TEST_P(PairOfReductions, CommutesIfItIsOneOrBothAreLinear) {
  const auto [a, b] = GetParam();
  const bool linear =
      (a == PartialOp::kSum || a == PartialOp::kAvg) && (b == PartialOp::kSum || b == PartialOp::kAvg);
  EXPECT_EQ(commute(a, b), a == b || linear);
}

const auto kOps = Values(PartialOp::kSum, PartialOp::kAvg, PartialOp::kMin, PartialOp::kMax,
                         PartialOp::kProduct, PartialOp::kBand, PartialOp::kBor, PartialOp::kBxor);
INSTANTIATE_TEST_SUITE_P(AllPairs, PairOfReductions, ::testing::Combine(kOps, kOps));

class NormBesides : public ::testing::TestWithParam<std::pair<Placement, bool>> {};

TEST_P(NormBesides, CommutesIfItIsOfTheSameOrder) {
  const auto norm = Placement::norm_partial({2, true});
  EXPECT_EQ(commute(norm, GetParam().first), GetParam().second);
  EXPECT_EQ(commute(GetParam().first, norm), GetParam().second);
}

INSTANTIATE_TEST_SUITE_P(Partials, NormBesides,
                         Values(std::pair{Placement::norm_partial({2, true}), true},
                                std::pair{Placement::norm_partial({3, true}), false},
                                std::pair{Placement::partial(), false}));

}  // namespace
}  // namespace funcol::placement_test
