// Rows of rules in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "propagation/propagator.h"
#include "sharding/mask_partials.h"

namespace funcol::python {

// The rows that `rows_of(op_schema)` returns: lists of placements on one mesh axis, outputs first, then
// inputs. Nothing if it returns None. Adds their masks to `masks`. NotImplementedError for placements with
// rules of their own, ValueError for rows of another length. Needs the GIL.
std::optional<Rows> python_rows(py::handle op_schema, const OpSchema& schema, py::handle rows_of,
                                MaskObjects& masks);

}  // namespace funcol::python
