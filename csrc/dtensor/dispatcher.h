// What DTensor's dispatcher does around an operator: arguments taken apart and moved, results wrapped.
//
// All need the GIL, and give a null object, with nothing done, for what PyTorch's own function has to do.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// The DTensors of an operator's local results, one by one or in a list or tuple; null if there is something
// else among them.
py::object wrapped(py::handle local, py::handle spec);

// The results of `op` on the local tensors of an OpInfo, its arguments changed as the decision says. If the
// first one moved, `first_moved_hook(op, local, spec, moved, its spec)` is called then.
py::object run_changed(py::handle dispatcher, py::handle op, py::handle info, py::handle first_moved_hook);

// The OpInfo, without a schema, of plain DTensors among arguments that are no tensors.
py::object unwrapped(py::handle dispatcher, py::handle op, const py::tuple& args);

}  // namespace funcol::python
