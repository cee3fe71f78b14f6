// The fields of a DTensorSpec, as Python's objects and as values.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"

namespace funcol::python {

struct SpecObjects {
  explicit SpecObjects(py::handle spec)
      : mesh(attribute<"mesh">(spec)),
        placements(attribute<"placements">(spec)),
        order(attribute<"shard_order">(spec)) {}

  Layout read() const { return {to_placements(placements), to_shard_order(order)}; }

  py::object mesh;
  py::object placements;
  py::object order;
};

// Python's ==.
bool are_equal(const py::object& one, const py::object& other);

// Returns true if the placements and shard orders of two specs are equal.
bool hold_alike(py::handle spec, py::handle other);

// The integers of a tuple; false if it is no tuple, or one of them is a symbol.
bool read_ints(py::handle tuple, std::vector<int64_t>& numbers);

// The spec's tensor_meta; ValueError naming `op` if it has none.
py::object meta_of(py::handle spec, const char* op);

// The shape of the whole tensor. A symbol becomes the number that it stands for, and a guard.
std::vector<int64_t> shape_of(py::handle spec, const char* op);

}  // namespace funcol::python
