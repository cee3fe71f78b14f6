// Sharding decisions as Python's DTensorSpecs.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "pyobjects/op_schemas.h"
#include "sharding/mask_partials.h"

namespace funcol::python {

// (specs of outputs, specs of inputs, costs, whether inputs are redistributed). `masks` are those of rows
// from Python; the masks that the decision itself introduces are made here.
py::tuple decided_specs(const PythonSchema& schema, const Part& part, const OutputSharding& sharding,
                        MaskObjects masks);

// The same decision for another element of the operator's lists: with its own specs of outputs.
py::tuple with_own_outputs(const py::tuple& decided);

}  // namespace funcol::python
