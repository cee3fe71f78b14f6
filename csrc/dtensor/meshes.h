// DeviceMeshes as redistributions need them: values, this rank's coordinate, process groups.
//
// Everything here needs the GIL, which is the lock of the table, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

#include "redistribute/executor.h"

namespace funcol::python {

// What is known of a DeviceMesh. Groups are looked up when a plan first needs them.
struct KnownMesh {
  uint64_t id = 0;
  Mesh mesh;
  std::optional<Coordinate> coordinate;  // none on a rank outside of the mesh
  AxisGroups groups;
};

// What is known of a mesh; good until the DeviceMesh goes.
KnownMesh& known_mesh(py::handle device_mesh);

// The group along `axes` that this rank is in; good as `known` is.
const AxisGroup& find_group(AxisSet axes, py::handle device_mesh, KnownMesh& known);

}  // namespace funcol::python
