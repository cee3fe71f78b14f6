#include "pyobjects/meshes.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "compat/process_group.h"
#include "layout/tables.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/layouts.h"
#include "pyobjects/mesh_table.h"

namespace funcol::python {
namespace {

MeshTable<KnownMesh>& known_meshes() {
  static MeshTable<KnownMesh> meshes([](const KnownMesh& known) { forget_mesh(known.id); });
  return meshes;
}

MeshTable<GroupMoment>& moments() {
  static MeshTable<GroupMoment> moments;
  return moments;
}

}  // namespace

size_t num_known_meshes() { return known_meshes().size() + moments().size(); }

void forget_mesh_of(const std::string& name) {
  const bool is_of_mesh = known_meshes().any_of([&](const KnownMesh& known) {
    return known.world == name ||
           std::any_of(known.groups.begin(), known.groups.end(), [&](const auto& entry) {
             const auto& group = entry.second.group;
             return group.isString() && group.toStringRef() == name;
           });
  });
  if (is_of_mesh) {
    clear_tables();
  }
}

uint64_t value_of_mesh(const py::object& mesh) {
  static auto* const numbers = new MeshTable<uint64_t>;  // NOLINT: outlives Python
  static PyObject* by_value = nullptr;                   // a dictionary with the first mesh of each value
  if (by_value == nullptr) {
    by_value = py::module_::import("weakref").attr("WeakKeyDictionary")().release().ptr();
  }
  if (const auto* const known = numbers->find(mesh)) {
    return *known;
  }
  static uint64_t num_values = 0;
  const auto number = py::handle(by_value).attr("setdefault")(mesh, num_values + 1).cast<uint64_t>();
  num_values = std::max(num_values, number);
  return numbers->insert_or_assign(mesh, number);
}

void note_mesh(py::handle device_mesh) {
  if (moments().find(device_mesh) == nullptr) {
    moments().insert_or_assign(device_mesh, group_moment());
  }
}

GroupMoment mesh_moment(py::handle device_mesh) {
  if (group_moment() == 0) {
    return 0;
  }
  if (const auto* const known = moments().find(device_mesh)) {
    return *known;
  }
  const py::object root = device_mesh.attr("_get_root_mesh")();
  return moments().insert_or_assign(device_mesh, root.is(device_mesh) ? group_moment() : mesh_moment(root));
}

KnownMesh& known_mesh(py::handle device_mesh) {
  const auto& mesh = to_mesh(device_mesh);
  auto* const known = known_meshes().find(device_mesh);
  if (known != nullptr && known->mesh == mesh) {
    return *known;
  }
  if (known != nullptr) {
    forget_mesh(known->id);
  }
  const py::object coordinate = device_mesh.attr("get_coordinate")();
  auto& entry = known_meshes().insert_or_assign(device_mesh,
                                                {new_mesh_id(),
                                                 mesh,
                                                 std::nullopt,
                                                 {},
                                                 {},
                                                 {},
                                                 mesh_moment(device_mesh),
                                                 attribute<"device_type">(device_mesh).cast<std::string>()});
  if (!coordinate.is_none()) {
    entry.coordinate = coordinate.cast<Coordinate>();
  }
  return entry;
}

KnownMesh* find_mesh(py::handle object) {
  try {
    return &known_mesh(object);
  } catch (const c10::TypeError&) {
    return nullptr;
  }
}

const AxisGroup& find_group(AxisSet axes, py::handle device_mesh, KnownMesh& known) {
  auto& groups = known.groups;
  const auto known_group = groups.find(axes);
  if (known_group != groups.end()) {
    return known_group->second;
  }
  const auto found = callback("axis_group")(device_mesh, axes).cast<py::tuple>();
  const auto name = found[0].cast<std::string>();
  const auto c10d_group = compat::registered_group(name);
  AxisGroup group{name, found[1].cast<std::vector<int64_t>>(),
                  c10d_group ? GroupRef(c10d_group, known.made_at) : GroupRef()};
  return groups.emplace(axes, std::move(group)).first->second;
}

const std::vector<int64_t>& all_ranks(py::handle device_mesh, KnownMesh& known) {
  if (known.ranks.empty()) {
    const auto found = callback("ranks_of_mesh")(device_mesh).cast<py::tuple>();
    known.world = found[0].cast<std::string>();
    known.ranks = found[1].cast<std::vector<int64_t>>();
  }
  return known.ranks;
}

}  // namespace funcol::python
