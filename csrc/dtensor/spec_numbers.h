// Numbers that stand for DTensorSpecs, found by the hash that a spec keeps.
//
// Specs of equal numbers are equal, and on one mesh. No spec and no mesh is kept alive.
// Everything here needs the GIL, which is the lock of the table, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>

namespace funcol::python {

// 0 for a spec that C++ has no values for: symbolic sizes, masks, placements of unknown kinds, no
// tensor_meta.
uint64_t number_of_spec(PyObject* spec);

void forget_spec_numbers();
size_t num_spec_numbers();  // that are remembered

}  // namespace funcol::python
