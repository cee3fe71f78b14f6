// The module funcol._C.
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The C++ side of funcol; use it through the funcol package.";
  funcol::python::bind_collectives(m);
  funcol::python::bind_async(m);
  funcol::python::bind_in_flight(m);
  funcol::python::bind_installation(m);
  funcol::python::bind_planner(m);
  funcol::python::bind_propagation(m);
  funcol::python::bind_dtensor(m);
  funcol::python::bind_mesh_changes(m);
  funcol::python::bind_fsdp(m);
}
