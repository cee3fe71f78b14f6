// Redistribution of many tensors at once: a collective a step for all whose plans have the same steps.
//
// Both need the GIL. `options` holds for all tensors; its bound is on what travels together, too. All tensors
// are on one mesh: NotImplementedError otherwise. On a rank outside of the mesh local tensors stay as they
// are.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "dtensor/redistributions.h"

namespace funcol::python {

// The local tensors of `dst_specs` for those of `src_specs`: lists of one length.
py::list redistribute_locals(const py::list& locals, const py::list& src_specs, const py::list& dst_specs,
                             const RedistributionOptions& options);

// DTensors where each of `placements` wants them, a tuple for each. Null, with nothing done, if they have to
// go one by one: sizes are symbols, or there are masks.
py::object redistribute_many(const py::list& dtensors, const py::list& placements,
                             const RedistributionOptions& options);

}  // namespace funcol::python
