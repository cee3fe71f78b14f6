// Redistribution of many tensors at once: tensors whose plans have the same steps share their collectives.
//
// Both need the GIL. `options` holds for all tensors, and its bound for the sum of tensors that share a
// collective. NotImplementedError if the tensors are on different meshes. On a rank outside of the mesh local
// tensors stay as they are.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

// The local tensors of `src_specs`, redistributed to `dst_specs`. The lists have one length. An active
// DebugMode of PyTorch notes each redistribution, and then the operators of all; `is_explicit`: as asked for
// by the program.
py::list redistribute_locals(const py::list& locals, const py::list& src_specs, const py::list& dst_specs,
                             const RedistributionOptions& options, bool is_explicit);

// Each DTensor redistributed to its tuple of `placements`. Null, with nothing done, if one of them has
// symbols as sizes or masks: those go one by one.
py::object redistribute_many(const py::list& dtensors, const py::list& placements,
                             const RedistributionOptions& options);

}  // namespace funcol::python
