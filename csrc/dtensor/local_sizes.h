// How much of a tensor this rank holds, and the arguments of operators that have to say so.
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

// LocalSizeArgs by the position of arguments in the schema of an overload.
struct LocalSizePlaces {
  std::optional<size_t> shape;
  std::optional<size_t> stride;
  std::vector<size_t> batch_channels_pixels;  // three, or none
  bool squeezed_dims = false;
};

// Those of an OpOverload. Nothing for operators, and for overloads, without such arguments: view_copy.dtype
// has no size.
std::optional<LocalSizePlaces> local_size_places(py::handle op_overload);

// The shape of what this rank holds of a tensor of `shape` under a DTensorSpec; outside the mesh, that of the
// first rank.
py::tuple local_shape_of(py::handle spec, const std::vector<int64_t>& shape);

// The axes that cut a dim of which not all ranks hold as much.
std::set<int64_t> uneven_axes(py::handle spec, const std::vector<int64_t>& shape);

}  // namespace funcol::python
