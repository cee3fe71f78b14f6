// The room csrc/pyobjects for Python.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/spec_methods.h"
#include "pyobjects/specs.h"

namespace funcol::python {

void bind_pyobjects(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module>(module);
  m.def("hand_over", hand_over, py::arg("name"), py::arg("function"));
  m.def("copy_spec", copy_spec, py::arg("spec"));
  m.def("spec_methods", spec_methods, py::arg("type"), py::arg("equals"), py::arg("hash"));
  m.def("placement_methods", placement_methods, py::arg("types"), py::arg("equals"));
  m.def("canonical_spec", canonical_spec, py::arg("spec"));
}

}  // namespace funcol::python
