// The values of DeviceMeshes that redistributions need: axes, this rank's coordinate, process groups.
//
// Everything here needs the GIL, which is the lock of the table, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "redistribute/executor.h"

namespace funcol::python {

// The values of a DeviceMesh. Groups are added when a plan first needs them.
struct KnownMesh {
  uint64_t id = 0;
  Mesh mesh;
  std::optional<Coordinate> coordinate;  // none on a rank outside of the mesh
  AxisGroups groups;
  std::string device_type;
};

// Valid while the DeviceMesh lives.
KnownMesh& known_mesh(py::handle device_mesh);

// Null for an object that is no DeviceMesh.
KnownMesh* find_mesh(py::handle object);

// This rank's group along `axes`. Valid as long as `known` is.
const AxisGroup& find_group(AxisSet axes, py::handle device_mesh, KnownMesh& known);

}  // namespace funcol::python
