#include "sharding/local_sizes.h"

#include <pybind11/stl.h>

#include <string_view>
#include <utility>

#include "layout/shards.h"
#include "pyobjects/layouts.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

// Returns the layout of a DTensorSpec for a tensor of `num_dims` dims, with Replicate instead of partials of
// any kind: they do not change local sizes.
Layout cuts_of(py::handle spec, const Mesh& mesh, size_t num_dims) {
  std::vector<Placement> placements;
  for (const auto& placement : spec.attr("placements")) {
    placements.push_back(placement.attr("is_partial")().cast<bool>() ? Placement::replicate()
                                                                     : to_placement(placement));
  }
  return make_layout("funcol: spec", std::move(placements), to_shard_order(spec.attr("shard_order")), mesh,
                     static_cast<int64_t>(num_dims));
}

// Returns this rank's coordinate; outside the mesh, that of the first rank.
Coordinate coordinate_on(py::handle spec, const Mesh& mesh) {
  const py::object known = spec.attr("mesh").attr("get_coordinate")();
  return known.is_none() ? Coordinate(mesh.sizes.size()) : known.cast<std::vector<int64_t>>();
}

}  // namespace

std::optional<LocalSizePlaces> local_size_places(py::handle op_overload) {
  const auto& op = to_operator(op_overload);
  const auto args = local_size_args(op.name);
  if (!args.has_value()) {
    return std::nullopt;
  }
  const auto place_of = [&](std::string_view name) -> std::optional<size_t> {
    return op.handle.schema().argumentIndexWithName(name);
  };
  LocalSizePlaces places{place_of(args->shape), place_of(args->stride), {}, args->squeezed_dims};
  if (!places.shape && !places.squeezed_dims && !args->batch_channels_pixels) {
    return std::nullopt;
  }
  if (args->batch_channels_pixels) {
    const auto batch = place_of("N");
    const auto channels = place_of("C");
    const auto pixels = place_of("HxW");
    TORCH_INTERNAL_ASSERT(batch && channels && pixels, op.name);
    places.batch_channels_pixels = {*batch, *channels, *pixels};
  }
  return places;
}

py::tuple local_shape_of(py::handle spec, const std::vector<int64_t>& shape) {
  const auto& mesh = to_mesh(spec.attr("mesh"));
  const auto layout = cuts_of(spec, mesh, shape.size());
  return py::tuple(py::cast(local_shape(layout, mesh, shape, coordinate_on(spec, mesh))));
}

std::vector<int64_t> shard_cuts(py::handle spec, int64_t num_dims) {
  const auto& mesh = to_mesh(spec.attr("mesh"));
  const auto layout = cuts_of(spec, mesh, num_dims);
  const auto coordinate = coordinate_on(spec, mesh);
  std::vector<int64_t> cuts;
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    for (const int64_t axis : layout.axes_of(dim)) {
      cuts.insert(cuts.end(),
                  {dim, mesh.sizes[axis], coordinate[axis], layout.placements[axis].split_factor});
    }
  }
  return cuts;
}

std::set<int64_t> uneven_axes(py::handle spec, const std::vector<int64_t>& shape) {
  const auto& mesh = to_mesh(spec.attr("mesh"));
  const auto layout = cuts_of(spec, mesh, shape.size());
  std::set<int64_t> uneven;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const auto index = static_cast<int64_t>(dim);
    if (!is_cut_evenly(layout, mesh, index, shape[dim])) {
      const auto& axes = layout.axes_of(index);
      uneven.insert(axes.begin(), axes.end());
    }
  }
  return uneven;
}

}  // namespace funcol::python
