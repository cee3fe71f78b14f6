#include "dispatch/local_arguments.h"

#include <algorithm>
#include <numeric>

#include "dispatch/strides.h"
#include "layout/shards.h"
#include "pyobjects/meshes.h"
#include "sharding/local_sizes.h"

namespace funcol::python {
namespace {

using Arguments = std::vector<std::pair<size_t, c10::IValue>>;

bool has_shards(const Layout& layout) {
  return std::ranges::any_of(layout.placements, [](const auto& one) { return one.is_shard(); });
}

// Returns true if the call squeezes the same dims of this rank's part, of size `local`, as of the full
// tensor.
bool squeezes_as_whole(const OpCall& call, const std::vector<int64_t>& local) {
  const auto& shape = call.tensors[0].shape;
  std::vector<int64_t> dims(shape.size());
  if (call.has_arg("dim")) {
    dims = call.arg("dim").integers();
  } else {
    std::iota(dims.begin(), dims.end(), 0);
  }
  return std::ranges::all_of(dims, [&](int64_t dim) {
    const auto index = counted_from_0(call, dim, static_cast<int64_t>(shape.size()));
    return shape.empty() || local.at(index) != 1 || shape.at(index) == 1;
  });
}

}  // namespace

std::optional<Arguments> local_arguments(py::handle op_overload, const PythonSchema& schema,
                                         const CallDecision& decision, py::handle mesh) {
  const auto places = local_size_places(op_overload);
  if (!places) {
    return Arguments{};
  }
  if (places->shape && (decision.outputs.size() != 1 || !decision.outputs[0])) {
    return std::nullopt;
  }
  const auto& [meta, layout] =
      places->shape ? *decision.outputs[0] : Spec{schema.call.tensors[0], decision.inputs[0]};
  if (!has_shards(layout)) {
    return Arguments{};
  }
  const auto& known = known_mesh(mesh);
  const auto local = local_shape(layout, known.mesh, meta.shape, *known.coordinate);
  if (places->shape) {
    Arguments arguments{{*places->shape, local}};
    if (places->stride) {
      arguments.emplace_back(*places->stride, dense_strides(local, meta.stride));
    }
    return arguments;
  }
  if (places->squeezed_dims) {
    return squeezes_as_whole(schema.call, local) ? std::optional(Arguments{}) : std::nullopt;
  }
  int64_t num_pixels = 1;
  for (size_t dim = 2; dim < local.size(); ++dim) {
    num_pixels *= local[dim];
  }
  const auto& numbers = places->batch_channels_pixels;
  return Arguments{{numbers[0], local.at(0)}, {numbers[1], local.at(1)}, {numbers[2], num_pixels}};
}

}  // namespace funcol::python
