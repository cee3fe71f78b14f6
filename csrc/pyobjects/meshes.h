// The values of DeviceMeshes that redistributions need: axes, this rank's coordinate, process groups.
//
// Everything here needs the GIL, which is the lock of the table, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transfer/executor.h"

namespace funcol::python {

// The values of a DeviceMesh. Groups are added when a plan first needs them.
struct KnownMesh {
  uint64_t id = 0;
  Mesh mesh;
  std::optional<Coordinate> coordinate;  // none on a rank outside of the mesh
  AxisGroups groups;
  std::string world;  // the default group, and the mesh's ranks in it: once all_ranks() has read them
  std::vector<int64_t> ranks;  // the last axis counts first
  GroupMoment made_at = 0;     // mesh_moment()
  std::string device_type;
};

// Returns the values of a DeviceMesh. Valid while it lives.
KnownMesh& known_mesh(py::handle device_mesh);

// Returns a moment at which the mesh already existed, for a submesh that of its root mesh; 0 as long as no
// group has been aborted or reconfigured.
GroupMoment mesh_moment(py::handle device_mesh);

// Notes that the mesh exists. Call it for each existing mesh before a group is aborted or reconfigured.
void note_mesh(py::handle device_mesh);

size_t num_known_meshes();

// Empties all tables if a live mesh has looked up the group of this name, for one of its axes or for all its
// ranks: decisions keep meshes, and so groups with their threads and connections. Call it before the group is
// removed.
void forget_mesh_of(const std::string& group);

// Returns a number that equal meshes share, found once for each object: comparing two takes microseconds.
uint64_t value_of_mesh(const py::object& mesh);

// Returns the values of a DeviceMesh; null for other objects.
KnownMesh* find_mesh(py::handle object);

// Returns this rank's group along `axes`. Valid as long as `known` is.
const AxisGroup& find_group(AxisSet axes, py::handle device_mesh, KnownMesh& known);

// Returns the ranks of the mesh in the default group, and sets known.world to the name of that group.
const std::vector<int64_t>& all_ranks(py::handle device_mesh, KnownMesh& known);

}  // namespace funcol::python
