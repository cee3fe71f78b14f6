// The sizes of this rank's part of a tensor, and the arguments of operators that are such sizes.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

namespace funcol::python {

// Positions of such arguments in the schema of an overload; see LocalSizeArgs.
struct LocalSizePlaces {
  std::optional<size_t> shape;
  std::optional<size_t> stride;
  std::vector<size_t> batch_channels_pixels;  // three, or none
  bool squeezed_dims = false;
};

// Returns the positions for an OpOverload; nullopt if it has no such arguments. Overloads of an operator may
// differ: view_copy.dtype has no size.
std::optional<LocalSizePlaces> local_size_places(py::handle op_overload);

// Returns the shape of this rank's part of a tensor of `shape` under a DTensorSpec; outside the mesh, of the
// first rank's part.
py::tuple local_shape_of(py::handle spec, const std::vector<int64_t>& shape);

// Returns this rank's cuts of a tensor under a DTensorSpec, whose sizes may be symbols, as
// torch.ops.funcol.draw takes them: four numbers each. Outside the mesh, returns those of the first rank.
std::vector<int64_t> shard_cuts(py::handle spec, int64_t num_dims);

// Returns the axes that cut a dim unevenly.
std::set<int64_t> uneven_axes(py::handle spec, const std::vector<int64_t>& shape);

}  // namespace funcol::python
