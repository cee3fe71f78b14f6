#include "comm/custom_class.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace funcol::custom_class_test {
namespace {

// Returns a reduce op as Python passes it (a capsule) and as TorchScript does (an object).
std::vector<c10::IValue> both_forms(const c10::intrusive_ptr<c10d::ReduceOp>& reduce_op) {
  return {c10::IValue::make_capsule(reduce_op), c10::IValue(reduce_op)};
}

TEST(CustomClass, IsFoundInBothForms) {
  const auto reduce_op = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::MAX);
  for (const auto& value : both_forms(reduce_op)) {
    EXPECT_EQ(custom_class<c10d::ReduceOp>(value), reduce_op);
  }
}

TEST(CustomClass, AnythingElseIsNullAndKeepsItsReferences) {
  const auto reduce_op = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::MAX);
  for (const auto& value : both_forms(reduce_op)) {
    const auto before = reduce_op.use_count();
    EXPECT_FALSE(custom_class<c10d::ProcessGroup>(value));
    EXPECT_EQ(reduce_op.use_count(), before);
  }
  EXPECT_FALSE(custom_class<c10d::ProcessGroup>(c10::IValue("dp")));
}

}  // namespace
}  // namespace funcol::custom_class_test
