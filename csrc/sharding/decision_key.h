// The key under which a sharding decision is remembered: all that the decision depends on.
//
// Everything here needs the GIL.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "layout/layout.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {

struct DecisionKey {
  py::object op;  // an OpOverload
  OpCall call;
  std::vector<Layout> layouts;
  std::vector<std::optional<Layout>> results;
  uint64_t mesh;                 // of the first tensor, as value_of_mesh() numbers it
  std::vector<uint64_t> meshes;  // of all tensors, unless they are on one mesh
  std::vector<AxisSet> merged;
  bool strided_as_order = false;
  c10::ScalarType default_dtype;  // of floating-point results of integers

  size_t hash() const;
  size_t heap_bytes() const;
  friend bool operator==(const DecisionKey& a, const DecisionKey& b) {
    return a.op.is(b.op) && a.mesh == b.mesh && a.meshes == b.meshes && a.call == b.call &&
           a.layouts == b.layouts && a.results == b.results && a.merged == b.merged &&
           a.strided_as_order == b.strided_as_order && a.default_dtype == b.default_dtype;
  }
};

// `has_rule`: a rule in C++ decides. Such rules ask only for the kind and sign of factors, and a program may
// change factors in every step, so that the key leaves out their values.
DecisionKey decision_key(py::handle op_schema, const PythonSchema& schema, bool has_rule);

}  // namespace funcol::python
