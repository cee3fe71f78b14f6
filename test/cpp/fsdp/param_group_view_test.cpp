#include "fsdp/param_group_view.h"

#include <gtest/gtest.h>

#include "support/python.h"

namespace funcol::python::param_group_view_test {
namespace {

using test::python;

class Watched : public ::testing::Test {
 protected:
  static FullyShard::Member member(const py::object& owner, const char* name, const py::object& value) {
    return {Py_NewRef(owner.ptr()), PyUnicode_InternFromString(name), Py_NewRef(value.ptr())};
  }

  py::object type = python("type('Base', (), {'wait': 1, 'send': 2})");
  py::object heir = python("type('Heir', (x,), {})", type);
  py::dict names;
};

TEST_F(Watched, MembersAreUnchangedUntilOneIsReplaced) {
  FullyShard::Members members({member(heir, "wait", py::int_(1)), member(heir, "send", py::int_(2))});
  EXPECT_TRUE(members.are_unchanged());
  EXPECT_TRUE(members.are_unchanged());
  type.attr("send") = 3;  // in the base
  EXPECT_FALSE(members.are_unchanged());
  EXPECT_FALSE(members.are_unchanged());
  type.attr("send") = 2;
  EXPECT_TRUE(members.are_unchanged());
  heir.attr("wait") = 4;
  EXPECT_FALSE(members.are_unchanged());
}

TEST_F(Watched, NamesOfAModuleAreUnchangedUntilOneIsReplacedOrRemoved) {
  names["wait"] = 1;
  FullyShard::Members members({member(names, "wait", py::int_(1))});
  EXPECT_TRUE(members.are_unchanged());
  names["other"] = 5;
  EXPECT_TRUE(members.are_unchanged());
  names["wait"] = 2;
  EXPECT_FALSE(members.are_unchanged());
  names["wait"] = 1;
  EXPECT_TRUE(members.are_unchanged());
  names.attr("clear")();
  EXPECT_FALSE(members.are_unchanged());
}

TEST_F(Watched, NoMembersAreUnchanged) { EXPECT_TRUE(FullyShard::Members().are_unchanged()); }

}  // namespace
}  // namespace funcol::python::param_group_view_test
