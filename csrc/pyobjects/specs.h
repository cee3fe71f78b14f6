// PyTorch's DTensorSpecs made from values: each is made once and remembered, and copies are handed out.
//
// Programs write to specs. What is remembered is never what a program can reach.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>

#include "propagation/propagator.h"

namespace funcol::python {

// The Python placement that has a mask, told by Placement::mask.
using MaskedPlacements = std::function<py::object(const Placement&)>;

// A DTensorSpec that equals this one, as the program may have changed it, and is nobody else's.
py::object copy_spec(py::handle spec);

// One to be remembered, which does not keep its mesh; and a copy of that for a program.
py::object copy_without_mesh(py::handle spec);
py::object copy_onto(py::handle spec, py::handle mesh);

// The DTensorSpec of a tensor on `mesh`, a copy of one that Python's make_spec made and that is remembered
// while it is among the last 4096 that were asked for. Placements with a mask are asked of `masked`, and
// their specs made each time.
py::object to_python_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                          const MaskedPlacements& masked);

// What stands for all specs that equal this one, as long as it is kept: to tell specs apart by identity, and
// never for a program. NotImplementedError for masks; other errors as those of read_spec().
py::object canonical_spec(py::handle spec);

void forget_specs();

}  // namespace funcol::python
