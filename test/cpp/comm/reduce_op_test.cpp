#include "comm/reduce_op.h"

#include <gtest/gtest.h>

#include <string>

#include "support/refuses.h"

namespace funcol::reduce_op_test {
namespace {

using c10::ScalarType;
using c10d::ReduceOp;

class Names : public testing::TestWithParam<std::string> {};

TEST_P(Names, GoToOperatorsAndBack) {
  EXPECT_EQ(reduce_op_name(reduce_op_from_name(GetParam(), "all_reduce")), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, Names,
                         testing::Values("sum", "avg", "product", "min", "max", "band", "bor", "bxor"));

TEST(ReduceOp, NamesMayHaveAnyCase) {
  EXPECT_EQ(reduce_op_from_name("SuM", "all_reduce").op_, ReduceOp::SUM);
}

TEST(ReduceOp, AnUnknownNameIsAValueErrorThatNamesItAndTheOp) {
  EXPECT_TRUE(test::refuses<c10::ValueError>([] { reduce_op_from_name("mean", "all_reduce"); },
                                             {"'mean'", "funcol::all_reduce"}));
}

TEST(ReduceOp, PremulSumByNameIsRefusedSinceItsFactorIsMissing) {
  EXPECT_THROW(reduce_op_from_name("premul_sum", "all_reduce"), c10::ValueError);
}

TEST(ReduceOp, FromAnIValueTakesNamesAndObjects) {
  EXPECT_EQ(reduce_op_from_ivalue(c10::IValue("max"), "all_reduce").op_, ReduceOp::MAX);
  const c10::IValue object(c10::make_intrusive<ReduceOp>(ReduceOp::MIN));
  EXPECT_EQ(reduce_op_from_ivalue(object, "all_reduce").op_, ReduceOp::MIN);
  EXPECT_THROW(reduce_op_from_ivalue(c10::IValue(3), "all_reduce"), c10::TypeError);
}

TEST(ReduceOp, BitwiseNeedsIntegers) {
  EXPECT_THROW(check_reduce_op(ReduceOp::BAND, ScalarType::Float, "nccl", "x"), c10::TypeError);
  EXPECT_NO_THROW(check_reduce_op(ReduceOp::BAND, ScalarType::Long, "gloo", "x"));
  EXPECT_NO_THROW(check_reduce_op(ReduceOp::BXOR, ScalarType::Bool, "gloo", "x"));
}

TEST(ReduceOp, ComplexNumbersHaveNoOrder) {
  EXPECT_THROW(check_reduce_op(ReduceOp::MAX, ScalarType::ComplexFloat, "gloo", "x"), c10::TypeError);
  EXPECT_NO_THROW(check_reduce_op(ReduceOp::AVG, ScalarType::ComplexDouble, "gloo", "x"));
}

TEST(ReduceOp, AverageIsRefusedWhereABackendOrDtypeLacksIt) {
  EXPECT_THROW(check_reduce_op(ReduceOp::AVG, ScalarType::Float, "mpi", "x"), c10::NotImplementedError);
  EXPECT_THROW(check_reduce_op(ReduceOp::AVG, ScalarType::Bool, "nccl", "x"), c10::TypeError);
  EXPECT_THROW(check_reduce_op(ReduceOp::AVG, ScalarType::Int, "gloo", "x"), c10::TypeError);
  EXPECT_NO_THROW(check_reduce_op(ReduceOp::AVG, ScalarType::Float, "gloo", "x"));
}

TEST(ReduceOp, GlooIsAskedForDtypesItKnowsOnly) {
  EXPECT_THROW(check_reduce_op(ReduceOp::SUM, ScalarType::Short, "gloo", "x"), c10::TypeError);
  EXPECT_NO_THROW(check_reduce_op(ReduceOp::SUM, ScalarType::Short, "some_other", "x"));
}

TEST(ReduceOp, WhatIsSupportedEverywherePassesTheCheckOnEachBackend) {
  for (const auto kind : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,
                          ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
    for (const auto dtype :
         {ScalarType::Float, ScalarType::Bool, ScalarType::Short, ScalarType::ComplexFloat}) {
      if (is_supported_everywhere(kind, dtype)) {
        EXPECT_NO_THROW(check_reduce_op(kind, dtype, "gloo", "x"));
        EXPECT_NO_THROW(check_reduce_op(kind, dtype, "mpi", "x"));
      }
    }
  }
}

}  // namespace
}  // namespace funcol::reduce_op_test
