// Rows of one mesh axis that rules in Python give.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "dtensor/mask_objects.h"
#include "propagation/propagator.h"

namespace funcol::python {

// What `rows_of(op_schema)` answers: lists of placements, outputs first, then inputs. Nothing where it
// answers None. Adds the masks among them to `masks`. NotImplementedError for placements with rules of their
// own, ValueError for rows of another length. Needs the GIL.
std::optional<Rows> python_rows(py::handle op_schema, const OpSchema& schema, py::handle rows_of,
                                MaskObjects& masks);

}  // namespace funcol::python
