// Functions that add to the module; bind_x() is in bind_x.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

namespace funcol::python {

void bind_collectives(py::module m);
void bind_local_types(py::module m);
void bind_async(py::module m);
void bind_in_flight(py::module m);
void bind_raw_access(py::module m);
void bind_installation(py::module m);
void bind_planner(py::module m);
void bind_propagation(py::module m);
void bind_dtensor(py::module m);
void bind_mesh_changes(py::module m);
void bind_fsdp(py::module m);

inline py::tuple tuple_of(const std::vector<int64_t>& values) { return py::cast(values).cast<py::tuple>(); }

}  // namespace funcol::python
