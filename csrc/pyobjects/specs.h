// PyTorch's DTensorSpecs made of values: each is made once and remembered, and callers get copies.
//
// Programs write to specs, so that they never get a remembered one. Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>

#include "propagation/propagator.h"

namespace funcol::python {

// Finds the Python placement with a mask, by Placement::mask.
using MaskedPlacements = std::function<py::object(const Placement&)>;

// A new DTensorSpec that equals `spec`.
py::object copy_spec(py::handle spec);

// A copy to remember, which does not keep the mesh alive, and the copy of that on its mesh.
py::object copy_without_mesh(py::handle spec);
py::object copy_onto(py::handle spec, py::handle mesh);

// A new DTensorSpec of a tensor on `mesh`. Python's make_spec makes it, or it is the copy of one of the last
// 4096 specs. `masked` gives placements with masks; specs with masks are not remembered.
py::object to_python_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                          const MaskedPlacements& masked);

// The same object for all specs that equal this one, while it is kept: to compare specs by identity. Programs
// must not get it. NotImplementedError for masks; otherwise raises what read_spec() raises.
py::object canonical_spec(py::handle spec);

// A number for all specs that equal this one and are on its mesh, never used again for others. It keeps
// nothing alive; an equal spec may get another number once many were asked for. 0 for masks; otherwise raises
// what read_spec() raises.
uint64_t value_number(py::handle spec);

void forget_specs();
size_t num_specs();  // that are remembered, and numbers of theirs

// The Python placement Replicate().
py::object replicate();

}  // namespace funcol::python
