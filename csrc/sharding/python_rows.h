// Rows of sharding rules that are written in Python, and the masked placements in them.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "propagation/propagator.h"

namespace funcol::python {

// Masked placements of a decision as Python's objects, found by Placement::mask.
class MaskObjects {
 public:
  void add(uint64_t mask, const py::object& placement) { objects_.emplace_back(mask, placement); }

  bool empty() const { return objects_.empty(); }

  // Returns the placement of a mask; null if the mask is not known.
  py::object find(uint64_t mask) const {
    const auto found =
        std::ranges::find_if(objects_, [mask](const auto& entry) { return entry.first == mask; });
    return found == objects_.end() ? py::object() : found->second;
  }

 private:
  std::vector<std::pair<uint64_t, py::object>> objects_;
};

// Reads a row: placements of `num_outputs` outputs, then of tensors, by to_placement() or
// to_placement_or_norm(). PyTorch's placeholder for a shard is any shard of its dim. Adds masks to `masks`.
// Returns nullopt if a tensor has no placement.
std::optional<Row> read_row(const py::sequence& cells, size_t num_outputs, Placement (*read)(py::handle),
                            MaskObjects& masks);

// Returns the rows that `rows_of(op_schema)` returns: lists of placements on one mesh axis, outputs first,
// then inputs; nullopt if it returns None. Adds their masks to `masks`. Raises NotImplementedError for
// placements with rules of their own, ValueError for rows of another length.
std::optional<Rows> python_rows(py::handle op_schema, const OpSchema& schema, py::handle rows_of,
                                MaskObjects& masks);

}  // namespace funcol::python
