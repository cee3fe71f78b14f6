// Full tensors on owners, each tensor on one rank of the mesh: from shards and back, many in one collective.
//
// Both functions need the GIL. All tensors are on one mesh, whose ranks are numbered in row-major order.
// `max_bytes` bounds the full tensors that share a collective. Both raise NotImplementedError for masks and
// norms, under modes, and if a gradient is to be recorded.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace funcol::python {

struct OwnerOptions {
  bool async_op = false;
  std::optional<int64_t> max_bytes;
};

// Returns the full tensor of each DTensor if this rank is its owner, else None.
py::list move_to_owners(const py::list& dtensors, const std::vector<int64_t>& owners,
                        const OwnerOptions& options);

// Returns DTensors of tuples of `placements`, or of the spec's own where that is None, from full tensors,
// which are None on ranks that do not own them. `specs` are of the tensors in any layout. Raises
// NotImplementedError for partial targets, and ValueError if a full tensor is missing on its owner or does
// not match its spec.
py::list move_from_owners(const py::list& full_tensors, const py::list& specs,
                          const std::vector<int64_t>& owners, const py::list& placements,
                          const OwnerOptions& options);

}  // namespace funcol::python
