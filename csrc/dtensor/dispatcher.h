// The work of DTensor's dispatcher around an operator: it unwraps and redistributes arguments, and wraps
// results.
//
// All need the GIL, and return null, with nothing done, where PyTorch's own function has to run.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// The DTensor of a local result, or a list or tuple of DTensors. Null for results that are no tensors.
py::object wrapped(py::handle local, py::handle spec);

// The results of `op` on the local tensors of an OpInfo, redistributed as its decision says. If the first
// argument was redistributed, `first_moved_hook(op, local, spec, moved, its spec)` is called afterwards.
py::object run_changed(py::handle dispatcher, py::handle op, py::handle info, py::handle first_moved_hook);

// The OpInfo, without a schema, of arguments whose only tensors are plain DTensors.
py::object unwrapped(py::handle dispatcher, py::handle op, const py::tuple& args);

}  // namespace funcol::python
