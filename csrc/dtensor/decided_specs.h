// Sharding decisions as Python has them: DTensorSpecs.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "dtensor/mask_objects.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {

// (specs of outputs, specs of inputs, costs, whether inputs are redistributed). `masks`: those that rows in
// Python have; those that the decision makes are made here.
py::tuple decided_specs(const PythonSchema& schema, const Part& part, const OutputSharding& sharding,
                        MaskObjects masks);

// The same decision, with outputs of its own, for another element of the operator's lists.
py::tuple with_own_outputs(const py::tuple& decided);

}  // namespace funcol::python
