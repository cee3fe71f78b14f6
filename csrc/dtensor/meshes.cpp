#include "dtensor/meshes.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "pyobjects/callbacks.h"
#include "pyobjects/layouts.h"
#include "pyobjects/mesh_table.h"

namespace funcol::python {
namespace {

MeshTable<KnownMesh>& known_meshes() {
  static MeshTable<KnownMesh> meshes;
  return meshes;
}

}  // namespace

KnownMesh& known_mesh(py::handle device_mesh) {
  static uint64_t num_meshes = 0;
  const auto& mesh = to_mesh(device_mesh);
  auto* const known = known_meshes().find(device_mesh);
  if (known != nullptr && known->mesh == mesh) {
    return *known;
  }
  const py::object coordinate = device_mesh.attr("get_coordinate")();
  auto& entry = known_meshes().put(
      device_mesh,
      {++num_meshes, mesh, std::nullopt, {}, attribute<"device_type">(device_mesh).cast<std::string>()});
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
  const auto found = callback(Callback::kAxisGroup)(device_mesh, axes).cast<py::tuple>();
  AxisGroup group{found[0].cast<std::string>(), found[1].cast<std::vector<int64_t>>()};
  return groups.emplace(axes, std::move(group)).first->second;
}

}  // namespace funcol::python
