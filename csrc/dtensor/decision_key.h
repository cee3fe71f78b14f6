// What a sharding decision depends on, as the key under which it is remembered.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "layout/layout.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {

struct DecisionKey {
  py::object op;  // as Python has it
  OpCall call;
  std::vector<Layout> layouts;
  std::vector<std::optional<Layout>> results;
  py::object mesh;  // the first that equals that of the first tensor; kept, as its address is it
  std::vector<py::object> meshes;  // of all, where they are not all the first one
  std::vector<AxisSet> merged;

  friend bool operator==(const DecisionKey& a, const DecisionKey& b) {
    return a.op.is(b.op) && a.mesh.is(b.mesh) && a.call == b.call && a.layouts == b.layouts &&
           a.results == b.results && a.merged == b.merged &&
           std::ranges::equal(a.meshes, b.meshes, [](const auto& x, const auto& y) { return x.is(y); });
  }
};

struct DecisionKeyHash {
  size_t operator()(const DecisionKey& key) const;
};

// `has_rule`: a rule in C++ decides. Of factors it asks for kind and sign alone, so that the key has no more
// of them: they may be others in every step of a program.
DecisionKey decision_key(py::handle op_schema, const PythonSchema& schema, bool has_rule);

// Lets go of the meshes that keys keep alive, one of all that are equal.
void forget_meshes_of_keys();

}  // namespace funcol::python
