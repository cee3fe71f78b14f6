// Where a redistribution leads: the execution of its plan and the spec of its result, remembered.
//
// Everything here needs the GIL, which is the lock of the cache, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

#include "dtensor/executions.h"

namespace funcol::python {

// The execution, which redistributions with equal specs share, and the spec of the result, which is the
// caller's own.
struct Target {
  ExecutionPtr execution;
  py::object spec;
};

struct TargetKey {
  ExecutionKey key;  // its dst as it was asked for
  std::vector<int64_t> stride;
  PyObject* dtype;  // PyTorch keeps them for ever

  friend bool operator==(const TargetKey&, const TargetKey&) = default;
};

// Where a tensor of `src_spec` gets by `placements`. The rank is inside the mesh; there are no masks.
// ValueError if there is no plan.
Target find_target(TargetKey key, py::handle src_spec, py::handle device_mesh, KnownMesh& known,
                   py::handle placements);
void forget_targets();

}  // namespace funcol::python
