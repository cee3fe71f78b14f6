#include "pyobjects/attributes.h"

#include <gtest/gtest.h>

#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::attributes_test {
namespace {

using test::python;
using test::refuses;

py::object with_property(const char* getter) {
  return python("type('Made', (), {'mesh': property(x)})()", python(getter));
}

TEST(FindAttribute, IsNullForAMissingOne) {
  EXPECT_FALSE(find_attribute<"mesh">(python("SimpleNamespace()")));
  EXPECT_FALSE(find_attribute<"mesh">(with_property("lambda self: self.missing")));
}

TEST(FindAttribute, RaisesOtherErrorsOfAProperty) {
  const auto broken = with_property("lambda self: 1 / 0");
  EXPECT_TRUE(refuses<py::error_already_set>([&] { find_attribute<"mesh">(broken); }, {"ZeroDivisionError"}));
}

}  // namespace
}  // namespace funcol::python::attributes_test
