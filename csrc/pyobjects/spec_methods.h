// DTensorSpec's comparison and hash, from C++.
//
// PyTorch's caches of decisions look operators up by the specs of their tensors. Specs that were copied of
// one another share their fields and their hash, so that four pointers tell what PyTorch's methods find in
// Python. Objects of other kinds, and hashes that are not known yet, are left to PyTorch's methods.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace funcol::python {

// `__eq__` and `__hash__` for `type`, DTensorSpec, as method descriptors; `equals` and `hash` are PyTorch's.
std::pair<py::object, py::object> spec_methods(py::object type, py::object equals, py::object hash);

}  // namespace funcol::python
