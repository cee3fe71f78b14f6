// The module funcol._C.
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The C++ side of funcol; use it through the funcol package.";
  funcol::python::bind_collectives(m.ptr());
  funcol::python::bind_in_place(m.ptr());
  funcol::python::bind_local_types(m.ptr());
  funcol::python::bind_async(m.ptr());
  funcol::python::bind_in_flight(m.ptr());
  funcol::python::bind_raw_access(m.ptr());
  funcol::python::bind_installation(m.ptr());
  funcol::python::bind_planner(m.ptr());
  funcol::python::bind_propagation(m.ptr());
  funcol::python::bind_pyobjects(m.ptr());
  funcol::python::bind_dtensor(m.ptr());
  funcol::python::bind_mesh_changes(m.ptr());
  funcol::python::bind_fsdp(m.ptr());
  funcol::python::bind_weights(m.ptr());
  funcol::python::bind_info(m.ptr());
}
