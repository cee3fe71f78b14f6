#include "ops/schemas.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

namespace funcol::schemas_test {
namespace {

// Neither is a kernel registered under a name that is not defined, nor an operator defined that has no
// kernels.
TEST(Schemas, AreThoseOfTheKernels) {
  define_operators();
  auto& dispatcher = c10::Dispatcher::singleton();
  size_t num_operators = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("funcol::")) {
      continue;
    }
    ++num_operators;
    const auto op = dispatcher.findOp(name);
    ASSERT_TRUE(op.has_value()) << name.name;
    EXPECT_TRUE(op->hasSchema()) << name.name;
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta}) {
      EXPECT_TRUE(op->hasKernelForDispatchKey(key)) << name.name;
    }
  }
  EXPECT_GT(num_operators, 0U);
}

}  // namespace
}  // namespace funcol::schemas_test
