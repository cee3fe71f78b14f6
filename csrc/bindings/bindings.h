// Functions that add to the module; bind_x() is in bind_x.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

namespace funcol::python {

void bind_collectives(PyObject* module);
void bind_in_place(PyObject* module);
void bind_local_types(PyObject* module);
void bind_async(PyObject* module);
void bind_in_flight(PyObject* module);
void bind_raw_access(PyObject* module);
void bind_installation(PyObject* module);
void bind_planner(PyObject* module);
void bind_info(PyObject* module);
void bind_propagation(PyObject* module);
void bind_pyobjects(PyObject* module);
void bind_dtensor(PyObject* module);
void bind_mesh_changes(PyObject* module);
void bind_fsdp(PyObject* module);
void bind_weights(PyObject* module);

inline py::tuple tuple_of(const std::vector<int64_t>& values) { return py::cast(values).cast<py::tuple>(); }

}  // namespace funcol::python
