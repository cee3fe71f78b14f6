// DTensorSpec's comparison and hash, from C++.
//
// PyTorch's caches of decisions look operators up by the specs of their tensors. A spec and its copy share
// their fields and their hash, so that comparing four pointers suffices. PyTorch's own methods compare other
// objects, and compute hashes that are not known yet.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace funcol::python {

// The methods `__eq__` and `__hash__` for `type`, DTensorSpec; `equals` and `hash` are PyTorch's methods.
std::pair<py::object, py::object> spec_methods(py::object type, py::object equals, py::object hash);

}  // namespace funcol::python
