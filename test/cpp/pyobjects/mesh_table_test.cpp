#include "pyobjects/mesh_table.h"

#include <gtest/gtest.h>

#include "support/python.h"

namespace funcol::python::mesh_table_test {
namespace {

using test::python;

TEST(MeshTable, HoldsAValueAMesh) {
  static MeshTable<int> table;
  const auto one = python("new_line()");
  const auto equal = python("new_line()");
  EXPECT_EQ(table.insert_or_assign(one, 1), 1);
  EXPECT_EQ(*table.find(one), 1);
  EXPECT_EQ(table.find(equal), nullptr) << "meshes are told apart by address";
  table.insert_or_assign(one, 2);
  EXPECT_EQ(*table.find(one), 2);
  table.clear();
  EXPECT_EQ(table.find(one), nullptr);
}

TEST(MeshTable, LetsGoOfAMeshThatIsGone) {
  static MeshTable<int> table;
  auto mesh = python("new_line()");
  const py::handle address = mesh;
  table.insert_or_assign(mesh, 1);
  mesh = py::none();
  python("__import__('gc').collect()");
  EXPECT_EQ(table.find(address), nullptr);
}

}  // namespace
}  // namespace funcol::python::mesh_table_test
