#include "pyobjects/spec_methods.h"

#include <gtest/gtest.h>

#include "support/python.h"

namespace funcol::python::spec_methods_test {
namespace {

using test::python;

// The methods, over methods that answer "PyTorch".
class SpecMethods : public ::testing::Test {
 protected:
  py::object compare(const char* one, const char* other) const {
    return methods.first(python(one), python(other));
  }

  std::pair<py::object, py::object> methods = spec_methods(
      python("DTensorSpec"), python("lambda spec, other: 'PyTorch'"), python("lambda spec: 'PyTorch'"));
};

TEST_F(SpecMethods, SayThatEqualSpecsAreEqual) {
  EXPECT_TRUE(compare("spec(grid, [Shard(0), Partial()], 8, 4)", "spec(grid, [Shard(0), Partial()], 8, 4)")
                  .is(py::bool_(true)));
}

TEST_F(SpecMethods, TellSpecsApartByEachField) {
  for (const char* const other : {
           "spec(DeviceMesh('cpu', [[0, 2], [1, 3]]), [Shard(0), Shard(0)], 8, 4)",
           "spec(grid, [Shard(0), Shard(1)], 8, 4)",
           "spec(grid, [Shard(0), Shard(0)], 8, 4, order=[(0, (1, 0))])",
           "spec(grid, [Shard(0), Shard(0)], 8, 5)",
       }) {
    EXPECT_TRUE(compare("spec(grid, [Shard(0), Shard(0)], 8, 4)", other).is(py::bool_(false))) << other;
  }
}

TEST_F(SpecMethods, LeaveOtherObjectsToPyTorch) {
  EXPECT_TRUE(
      compare("spec(grid, [Shard(0), Partial()], 8, 4)", "torch.Size([8, 4])").equal(py::str("PyTorch")));
}

TEST_F(SpecMethods, GiveTheHashThatASpecKeeps) {
  const auto spec = python("spec(grid, [Shard(0), Partial()], 8, 4)");
  const auto hash = py::int_(py::hash(spec));
  EXPECT_TRUE(methods.second(spec).equal(hash));
}

TEST_F(SpecMethods, LeaveAnUnknownHashToPyTorch) {
  auto spec = python("spec(grid, [Shard(0), Partial()], 8, 4)");
  spec.attr("__dict__")["_hash"] = py::none();
  EXPECT_TRUE(methods.second(spec).equal(py::str("PyTorch")));
}

}  // namespace
}  // namespace funcol::python::spec_methods_test
