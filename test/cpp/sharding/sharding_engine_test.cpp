#include "sharding/sharding_engine.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include <string>

#include "layout/tables.h"
#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::sharding_engine_test {
namespace {

using test::python;
using test::refuses;

// An engine and what it asks Python for: assemble(schema, elements) gives the elements.
class Decisions : public ::testing::Test {
 protected:
  py::object decide(const std::string& schema, bool remember = true) {
    return decide(python(schema.c_str()), remember);
  }
  py::object decide(const py::object& schema, bool remember = true) {
    return engine.propagate(schema, rows_of, python("lambda schema, remember: ('whole', remember)"),
                            python("lambda schema, elements: elements"), remember);
  }
  // (hits, misses, capacity, number of decisions)
  std::vector<size_t> info() const { return engine.info().cast<std::vector<size_t>>(); }

  ShardingEngine engine{std::nullopt, /*capacity=*/2, /*moves_keywords=*/false};
  py::object rows_of = python("lambda schema: None");
};

std::string mm(const std::string& rows, const std::string& mesh = "line") {
  return "OpSchema(aten.mm.default, (spec(" + mesh + ", [Shard(0)], " + rows + ", 4), spec(" + mesh +
         ", [Replicate()], 4, 2)), {})";
}

std::string mul(const std::string& factor) {
  return "OpSchema(aten.mul.Scalar, (spec(line, [Shard(0)], 8), " + factor + "), {})";
}

TEST_F(Decisions, GiveSpecsOfOutputsAndInputs) {
  const auto elements = decide(mm("8"));
  ASSERT_EQ(py::len(elements), 1);
  EXPECT_TRUE(python("x[0][0][0] == spec(line, [Shard(0)], 8, 2)", elements).cast<bool>());
  EXPECT_TRUE(python("x[0][1][0] == spec(line, [Shard(0)], 8, 4)", elements).cast<bool>());
  EXPECT_TRUE(python("x[0][1][1] == spec(line, [Replicate()], 4, 2)", elements).cast<bool>());
  EXPECT_TRUE(python("x[0][2] == [0.0, 0.0] and x[0][3] is False", elements).cast<bool>());
}

TEST_F(Decisions, SayWhatMovesFirst) {
  const auto elements =
      decide("OpSchema(aten.add_.Tensor, (spec(line, [Shard(0)], 8, 4), spec(line, [Shard(1)], 8, 4)), {})");
  EXPECT_TRUE(python("x[0][1][1] == spec(line, [Shard(0)], 8, 4)", elements).cast<bool>());
  EXPECT_TRUE(python("x[0][2][1] > 0 and x[0][3] is True", elements).cast<bool>());
}

TEST_F(Decisions, AreRemembered) {
  const auto first = decide(mm("8"));
  EXPECT_TRUE(decide(mm("8")).is(first));
  EXPECT_FALSE(decide(mm("12")).is(first));
  EXPECT_EQ(info(), (std::vector<size_t>{1, 2, 2, 2}));
}

TEST_F(Decisions, AreNotRememberedUnasked) {
  const auto first = decide(mm("8"), /*remember=*/false);
  EXPECT_FALSE(decide(mm("8"), /*remember=*/false).is(first));
  EXPECT_EQ(info(), (std::vector<size_t>{0, 0, 2, 0}));
}

TEST_F(Decisions, AreForgottenOverTheCapacity) {
  const auto oldest = decide(mm("8"));
  for (int size = 12; size < 1200; size += 4) {
    decide(mm(std::to_string(size)));
    EXPECT_LE(info().back(), 2);
  }
  EXPECT_FALSE(decide(mm("8")).is(oldest));
}

TEST_F(Decisions, AreForgottenByAllEngines) {
  const auto first = decide(mm("8"));
  clear_tables();
  EXPECT_EQ(info().back(), 0);
  EXPECT_FALSE(decide(mm("8")).is(first));
}

TEST_F(Decisions, AreSharedByFactorsOfAKindAndSign) {
  const auto of_two = decide(mul("2.0"));
  EXPECT_TRUE(decide(mul("3.5")).is(of_two));
  EXPECT_FALSE(decide(mul("-2.0")).is(of_two));
  EXPECT_FALSE(decide(mul("2")).is(of_two));
}

TEST_F(Decisions, AreSharedByEqualMeshes) {
  const auto mesh = python("new_line()");
  const auto first = decide(mm("8"));
  EXPECT_TRUE(decide(python("OpSchema(aten.mm.default, (spec(x, [Shard(0)], 8, 4), spec(x, [Replicate()], 4, "
                            "2)), {})",
                            mesh))
                  .is(first));
}

TEST_F(Decisions, AreMadeAnewOnceAMeshIsFlattened) {
  const auto mesh = python("new_grid()");
  const auto schema =
      python("OpSchema(aten.clone.default, (spec(x, [Shard(0), Shard(1)], 8, 4),), {})", mesh);
  const auto first = decide(schema);
  EXPECT_TRUE(decide(schema).is(first));
  python("x._flatten('flat')", mesh);
  EXPECT_FALSE(decide(schema).is(first));
}

TEST_F(Decisions, OfAnOperatorThatIsLeftAreNotOurs) {
  decide(mm("8"));
  engine.disable_rule("aten::mm");
  EXPECT_EQ(info().back(), 0);
  EXPECT_TRUE(decide(mm("8")).equal(python("('whole', False)")));
}

TEST_F(Decisions, OfASchemaWithoutValuesAreOfTheWhole) {
  EXPECT_TRUE(decide("OpSchema(aten.mul.Scalar, (spec(line, [Shard(0)], 8), 1j), {})")
                  .equal(python("('whole', True)")));
  EXPECT_EQ(info().back(), 0) << "the caller that decides the full call caches it";
}

TEST_F(Decisions, FollowRowsOfPython) {
  engine.disable_rule("aten::neg");
  rows_of = python("lambda schema: [[Partial(), Shard(0)]]");
  const auto elements = decide("OpSchema(aten.neg.default, (spec(line, [Shard(0)], 8, 4),), {})");
  EXPECT_TRUE(
      python("x[0][0][0] == spec(line, [Partial()], 8, 4) and x[0][3] is False", elements).cast<bool>());
}

TEST_F(Decisions, FollowNoAverageOfUnevenShards) {
  engine.disable_rule("aten::mean");
  rows_of = python("lambda schema: [[Replicate(), Replicate()], [Partial('avg'), Shard(0)]]");
  const auto placement = [&](const char* rows) {
    const auto schema =
        "OpSchema(aten.mean.default, (spec(line, [Shard(0)], " + std::string(rows) + "),), {})";
    return python("x[0][0][0].placements", decide(schema));
  };
  EXPECT_TRUE(placement("8").equal(python("(Partial('avg'),)")));
  EXPECT_TRUE(placement("10").equal(python("(Replicate(),)")));
}

TEST_F(Decisions, RefuseRowsOfAnotherLength) {
  engine.disable_rule("aten::neg");
  rows_of = python("lambda schema: [[Shard(1)]]");
  EXPECT_TRUE(refuses<c10::ValueError>(
      [&] { decide("OpSchema(aten.neg.default, (spec(line, [Shard(0)], 8, 4),), {})"); },
      {"aten::neg", "a row of 1 placements", "1 for its outputs and then 1"}));
}

TEST_F(Decisions, OfElementsThatAreAlikeHaveOutputsOfTheirOwn) {
  const auto elements = decide(
      "OpSchema(aten._foreach_neg.default, ([spec(line, [Shard(0)], 8), spec(line, [Shard(0)], 8), "
      "spec(line, [Replicate()], 8)],), {})");
  EXPECT_TRUE(python("x[0][0][0] == x[1][0][0] and x[0][0][0] is not x[1][0][0]", elements).cast<bool>());
  EXPECT_TRUE(python("x[2][0][0] == spec(line, [Replicate()], 8)", elements).cast<bool>());
}

TEST_F(Decisions, AreAmongTheStrategies) {
  const auto strategies = engine.strategies(python(mm("8").c_str()), rows_of);
  EXPECT_TRUE(
      python("any(s[0][0] == spec(line, [Shard(0)], 8, 2) and sum(s[2]) == 0 for s in x[0])", strategies)
          .cast<bool>());
  EXPECT_TRUE(
      python("any(s[0][0].placements == (Partial(),) and s[3] for s in x[0])", strategies).cast<bool>());
}

}  // namespace
}  // namespace funcol::python::sharding_engine_test
