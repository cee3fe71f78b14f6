#include "dispatch/to_local_from_local.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <utility>
#include <vector>

#include "dispatch/dtensor_node.h"
#include "dispatch/redistribute.h"
#include "dispatch/strides.h"
#include "dispatch/supported_dtensor.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"

namespace funcol::python {
namespace {

// Returns a new tensor on the memory of `local`, without history, like the views that a custom function
// returns.
py::object fresh_view(const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  auto view = at::alias(local);
  if (auto* const meta = torch::autograd::impl::get_view_autograd_meta(view)) {
    meta->set_creation_meta(torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  }
  return to_python(std::move(view));
}

Dtype dtype_of(const at::Tensor& tensor) { return static_cast<Dtype>(tensor.scalar_type()); }

// Returns the gradient's default placements: replicated where the tensor is partial.
py::object gradient_placements(const py::object& placements, const std::vector<Placement>& values) {
  return with_replicate(placements, values.size(), [&](size_t axis) { return values[axis].is_partial(); });
}

// Returns true for None, tuples and lists. PyTorch rejects other objects as placements.
bool is_sequence_or_none(py::handle placements) {
  return placements.is_none() || PyTuple_Check(placements.ptr()) || PyList_Check(placements.ptr());
}

py::object as_tuple(py::handle sequence) {
  return sequence.is_none() ? py::none()
                            : py::object(py::tuple(py::reinterpret_borrow<py::object>(sequence)));
}

class FromLocalBackward final : public BackwardFunction {
 public:
  explicit FromLocalBackward(py::object grad_placements) : placements_(std::move(grad_placements)) {}
  const char* name() const override { return "funcol::from_local"; }

  py::object apply(const py::object& gradient) const override {
    if (is_dtensor(gradient) && !observes_redistribution()) {
      if (const auto redistributed = redistribute(gradient, {placements_})) {
        if (auto local = to_local(redistributed, py::none())) {
          return local;
        }
      }
    }
    return callback("gradient_of_from_local")(gradient, placements_);
  }
  std::vector<uint64_t> key() const override { return {hash_word(placements_)}; }

 private:
  py::object placements_;
};

// Returns a DTensor of `local`. Gradients get `grad_placements`, or the default ones if it is null.
py::object wrap_local(const at::Tensor& local, py::handle device_mesh,
                      const std::vector<Placement>& placements, TensorMeta meta,
                      py::object grad_placements = {}) {
  const Geometry geometry(meta.shape, meta.stride);
  const auto spec = new_spec(device_mesh, placements, std::move(meta));
  auto dtensor = to_python(make_dtensor(local.detach(), spec, geometry));
  if (is_recorded(local)) {
    if (!grad_placements) {
      grad_placements = gradient_placements(attribute<"placements">(spec), placements);
    }
    record<FromLocalBackward>(local, dtensor, std::move(grad_placements));
  }
  return dtensor;
}

class ToLocalBackward final : public BackwardFunction {
 public:
  ToLocalBackward(py::object spec, py::object grad_placements)
      : spec_(std::move(spec)), placements_(std::move(grad_placements)) {}
  const char* name() const override { return "funcol::to_local"; }

  py::object apply(const py::object& gradient) const override {
    const auto spec = plain_spec(spec_);
    if (spec.has_value() && is_default(spec->order) && plain_tensor(gradient.ptr()) != nullptr &&
        is_unobserved(gradient)) {
      const auto& local = THPVariable_Unpack(gradient.ptr());
      const auto objects = placements_.is_none()
                               ? gradient_placements(spec->objects.placements, spec->placements)
                               : placements_;
      const auto placements = plain_placements(objects, spec->placements.size(), spec->num_dims());
      if (placements.has_value() && local.dim() == spec->num_dims()) {
        TensorMeta meta{spec->shape, full_strides(local, *placements, spec->shape, spec->known->mesh),
                        dtype_of(local)};
        return wrap_local(local, spec->objects.mesh, *placements, std::move(meta));
      }
    }
    return callback("gradient_of_to_local")(gradient, spec_, placements_);
  }
  std::vector<uint64_t> key() const override { return {hash_word(spec_), hash_word(placements_)}; }

 private:
  py::object spec_;
  py::object placements_;
};

// Returns true if nn.Parameter has marked the tensor as a parameter, as it marks instances of subclasses.
bool is_parameter(py::handle tensor) {
  auto** const attributes = _PyObject_GetDictPtr(tensor.ptr());
  if (attributes == nullptr || *attributes == nullptr) {
    return false;
  }
  auto* const mark = PyDict_GetItemWithError(*attributes, interned<"_is_param">());
  return mark != nullptr && PyObject_IsTrue(mark) == 1;
}

}  // namespace

py::object to_local(py::handle dtensor, py::handle grad_placements) {
  const auto local = plain_local(dtensor);
  if (!local.defined() || !is_sequence_or_none(grad_placements)) {
    return {};
  }
  auto result = to_python(local);
  if (at::GradMode::is_enabled()) {
    result = fresh_view(local);
    const auto& tensor = THPVariable_Unpack(dtensor.ptr());
    if (is_recorded(tensor)) {
      record<ToLocalBackward>(tensor, result, attribute<"_spec">(dtensor), as_tuple(grad_placements));
    }
  }
  if (is_parameter(dtensor) && !is_parameter(result)) {
    if (THPVariable_Unpack(result.ptr()).is_same(local)) {
      result = fresh_view(local);
    }
    result.attr("_is_param") = true;
  }
  return result;
}

py::object from_local(py::handle local, py::handle device_mesh, py::handle placements, py::handle shape,
                      py::handle stride, py::handle grad_placements) {
  if (plain_tensor(local.ptr()) == nullptr || !is_unobserved(local)) {
    return {};
  }
  const auto& tensor = THPVariable_Unpack(local.ptr());
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.layout() != at::kStrided) {
    return {};
  }
  const auto* const found = find_mesh(device_mesh);
  if (found == nullptr) {
    return {};
  }
  const auto& known = *found;
  if (!known.coordinate.has_value() ||
      (!tensor.is_meta() &&
       c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true) != known.device_type)) {
    return {};
  }
  std::optional<std::vector<Placement>> values;
  if (placements.is_none()) {
    values.emplace(known.mesh.num_axes());
  } else {
    values = plain_placements(placements, known.mesh.num_axes(), tensor.dim());
  }
  if (!values.has_value()) {
    return {};
  }
  TensorMeta meta;
  meta.dtype = dtype_of(tensor);
  const bool has_shape = PyObject_IsTrue(shape.ptr()) == 1;
  if (has_shape != (PyObject_IsTrue(stride.ptr()) == 1)) {
    return {};
  }
  if (has_shape) {
    if (!read_ints(shape, meta.shape) || !read_ints(stride, meta.stride) ||
        meta.shape.size() != meta.stride.size() || meta.num_dims() != tensor.dim()) {
      return {};
    }
  } else {
    meta.shape = tensor.sizes().vec();
    for (size_t axis = 0; axis < values->size(); ++axis) {
      if ((*values)[axis].is_shard()) {
        meta.shape[(*values)[axis].dim] *= known.mesh.sizes[axis];
      }
    }
    meta.stride = full_strides(tensor, *values, meta.shape, known.mesh);
  }
  return wrap_local(tensor, device_mesh, *values, std::move(meta),
                    grad_placements.is_none() ? py::object() : as_tuple(grad_placements));
}

py::object full_tensor(py::handle dtensor, py::handle grad_placements) {
  const auto local = plain_local(dtensor);
  if (!local.defined() || !is_sequence_or_none(grad_placements)) {
    return {};
  }
  const auto spec = attribute<"_spec">(dtensor);
  const auto placements = attribute<"placements">(spec);
  const RedistributionTarget target{
      with_replicate(placements, py::len(placements), [](size_t /*axis*/) { return true; })};
  if (is_recorded(THPVariable_Unpack(dtensor.ptr()))) {
    const auto full = redistribute(dtensor, target);
    return full ? to_local(full, grad_placements) : py::object();
  }
  auto full = redistributed_local(local, spec, target);
  if (!full.has_value()) {
    return {};
  }
  const bool is_view = at::GradMode::is_enabled() || full->is_same(local);
  return is_view ? fresh_view(*full) : to_python(*std::move(full));
}

}  // namespace funcol::python
