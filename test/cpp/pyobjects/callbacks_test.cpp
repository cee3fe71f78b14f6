#include "pyobjects/callbacks.h"

#include <gtest/gtest.h>

#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::callbacks_test {
namespace {

using test::python;
using test::refuses;

TEST(Callback, IsTheFunctionOfItsName) {
  EXPECT_TRUE(python("x.__name__ == 'mesh_axes'", callback("mesh_axes")).cast<bool>());
  EXPECT_TRUE(python("x.__name__ == 'axis_group'", callback("axis_group")).cast<bool>());
}

TEST(Callback, IsTheOneHandedOverLast) {
  register_callback("note_redistribution", python("abs"));
  register_callback("note_redistribution", python("len"));
  EXPECT_TRUE(callback("note_redistribution").is(python("len")));
}

TEST(Callback, IsAnErrorBeforeItIsHandedOver) {
  EXPECT_TRUE(refuses<c10::Error>([] { callback("fill_mask"); }, {"fill_mask()"}));
}

TEST(HandOver, RefusesAnUnknownName) {
  EXPECT_TRUE(
      refuses<c10::ValueError>([] { register_callback("mesh_axis", python("len")); }, {"'mesh_axis'"}));
}

}  // namespace
}  // namespace funcol::python::callbacks_test
