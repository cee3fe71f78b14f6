// Functions that add to the module; bind_x() is in bind_x.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

#include "layout/shards.h"

namespace funcol::python {

void bind_collectives(py::module m);
void bind_async(py::module m);
void bind_in_flight(py::module m);
void bind_installation(py::module m);
void bind_planner(py::module m);
void bind_propagation(py::module m);
void bind_dtensor(py::module m);
void bind_mesh_changes(py::module m);
void bind_fsdp(py::module m);

inline py::tuple tuple_of(const std::vector<int64_t>& values) { return py::cast(values).cast<py::tuple>(); }

// Returns (begin, size) of each interval, by dim.
py::tuple pairs_of(const std::vector<Intervals>& indices);

// Reads a layout from Python's placements and shard order; `side` and `op` name it in errors.
Layout layout_argument(const char* op, const char* side, py::handle placements, py::handle order,
                       const Mesh& mesh, int64_t num_dims);

}  // namespace funcol::python
