#include "dispatch/supported_dtensor.h"

#include <algorithm>
#include <utility>

#include "async/dispatch_modes.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/tensors.h"

namespace funcol::python {

bool is_dtensor(py::handle object) { return Py_TYPE(object.ptr()) == dtensor_type(); }

bool is_unobserved(py::handle tensor) {
  return !is_observed() && !THPVariable_Unpack(tensor.ptr())._fw_grad(/*level=*/0).defined();
}

std::optional<std::vector<Placement>> plain_placements(py::handle sequence, size_t num_axes,
                                                       int64_t num_dims) {
  auto placements = known_placements(sequence, num_axes, num_dims);
  const auto is_supported = [num_dims](const Placement& placement) {
    return !placement.is_strided() &&
           (!placement.is_shard() || (placement.dim >= 0 && placement.dim < num_dims));
  };
  return placements.has_value() && std::ranges::all_of(*placements, is_supported) ? placements : std::nullopt;
}

at::Tensor plain_local(py::handle dtensor) {
  auto* const local = is_dtensor(dtensor) && is_unobserved(dtensor) ? local_of(dtensor.ptr()) : nullptr;
  const auto* const tensor = local == nullptr ? nullptr : plain_tensor(local);
  return tensor == nullptr ? at::Tensor() : *tensor;
}

std::optional<PlainSpec> plain_spec(py::handle spec) {
  const auto meta = attribute<"tensor_meta">(spec);
  PlainSpec plain{SpecObjects(spec), nullptr, {}, {}, {}, {}, at::ScalarType::Undefined};
  if (meta.is_none() || !read_ints(attribute<"shape">(meta), plain.shape) ||
      !read_ints(attribute<"stride">(meta), plain.stride)) {
    return std::nullopt;
  }
  const auto dtype = attribute<"dtype">(meta);
  plain.known = &known_mesh(plain.objects.mesh);
  auto placements =
      plain_placements(plain.objects.placements, plain.known->mesh.num_axes(), plain.num_dims());
  if (!THPDtype_Check(dtype.ptr()) || !plain.known->coordinate.has_value() || !placements.has_value()) {
    return std::nullopt;
  }
  plain.placements = *std::move(placements);
  plain.order = to_shard_order(plain.objects.order);
  plain.dtype = to_dtype(dtype);
  return plain;
}

}  // namespace funcol::python
