#include "transfer/dtensors/distribute.h"

#include <utility>
#include <vector>

#include "metas/output_metas.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/meshes.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"
#include "transfer/distribute.h"

namespace funcol::python {
namespace {

std::vector<AxisGroup> groups_of_axes(py::handle device_mesh, KnownMesh& known) {
  std::vector<AxisGroup> groups;
  for (int64_t axis = 0; axis < known.mesh.num_axes(); ++axis) {
    groups.push_back(find_group(axis_set(axis), device_mesh, known));
  }
  return groups;
}

}  // namespace

py::object distribute_tensor(const at::Tensor& tensor, py::handle device_mesh, py::handle placements,
                             std::optional<int64_t> source) {
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.layout() != at::kStrided) {
    return {};
  }
  auto& known = known_mesh(device_mesh);
  const auto num_axes = known.mesh.sizes.size();
  auto values = placements.is_none() ? std::optional(std::vector<Placement>(num_axes))
                                     : known_placements(placements, num_axes, tensor.dim());
  if (!known.coordinate.has_value() || !values.has_value()) {
    return {};
  }
  Distribution distribution{*std::move(values), known.mesh, *known.coordinate, {}};
  if (source.has_value()) {
    distribution.source = *source;
  }
  check(distribution, tensor);
  std::vector<AxisGroup> groups;
  if (distribution.communicates() && !tensor.is_meta()) {
    groups = groups_of_axes(device_mesh, known);
  }
  const auto spec = new_spec(device_mesh, distribution.placements, tensor_meta(tensor));
  const auto full = tensor.detach();
  at::Tensor local;
  {
    const WithoutGil no_gil;
    local = distribute(full, distribution, groups);
    local.set_requires_grad(tensor.requires_grad());
  }
  return make_dtensor(to_python(std::move(local)).ptr(), spec, tensor.requires_grad());
}

}  // namespace funcol::python
