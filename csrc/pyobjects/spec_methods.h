// The comparisons of DTensorSpecs and placements, and the hash of specs, from C++.
//
// PyTorch's caches of decisions look operators up by the specs of their tensors. A spec and its copy share
// their fields and their hash, so that comparing four pointers suffices. PyTorch's own methods compare other
// objects, and compute hashes that are not known yet. Placements of two classes, which parallel styles
// compare at each call, take PyTorch 3 us, since its bindings try the other class's method, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

namespace funcol::python {

// Returns the methods `__eq__` and `__hash__` for `type`, DTensorSpec; `equals` and `hash` are PyTorch's
// methods.
std::pair<py::object, py::object> spec_methods(py::object type, py::object equals, py::object hash);

// Returns the methods `__eq__` for the placement classes Replicate, Shard and Partial, none of which is
// another's base; `equals` are PyTorch's methods.
std::vector<py::object> placement_methods(const std::vector<py::object>& types,
                                          const std::vector<py::object>& equals);

}  // namespace funcol::python
