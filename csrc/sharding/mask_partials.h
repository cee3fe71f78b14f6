// The masked placements of a decision, as Python's objects, and the rows of rules that hold them.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "layout/placement.h"

namespace funcol::python {

// Found by Placement::mask.
class MaskObjects {
 public:
  void add(uint64_t mask, const py::object& placement) { objects_.emplace_back(mask, placement); }

  bool empty() const { return objects_.empty(); }

  // Null if the mask is not known.
  py::object find(uint64_t mask) const {
    const auto found =
        std::ranges::find_if(objects_, [mask](const auto& entry) { return entry.first == mask; });
    return found == objects_.end() ? py::object() : found->second;
  }

 private:
  std::vector<std::pair<uint64_t, py::object>> objects_;
};

// Reads a placement in a row of a rule, by to_placement() or to_placement_or_norm(). PyTorch's placeholder
// for a shard is any shard of its dim. Adds a mask to `masks`.
Placement read_cell(py::handle cell, Placement (*read)(py::handle), MaskObjects& masks);

}  // namespace funcol::python
