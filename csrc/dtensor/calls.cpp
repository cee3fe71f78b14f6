#include "dtensor/calls.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "async/layers.h"
#include "dtensor/gradients.h"
#include "dtensor/strides.h"
#include "dtensor/targets.h"
#include "layout/layout.h"
#include "pyobjects/arguments.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/specs.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

// A tensor of its own on the memory of `local`, without history, as views that a custom function returns.
py::object fresh_view(const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  auto view = at::alias(local);
  if (auto* const meta = torch::autograd::impl::get_view_autograd_meta(view)) {
    meta->set_creation_meta(torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(view)));
}

bool is_dtensor(py::handle object) { return Py_TYPE(object.ptr()) == dtensor_type(); }

// A tensor that nothing but its kernels looks at.
bool is_plain(py::handle tensor) {
  return THPVariable_CheckExact(tensor.ptr()) && !belongs_to_layer(THPVariable_Unpack(tensor.ptr()));
}

// Neither a mode nor a transform nor forward differentiation would have a say in what is called.
bool is_unwatched(py::handle tensor) {
  return !is_observed() && !THPVariable_Unpack(tensor.ptr())._fw_grad(/*level=*/0).defined();
}

// Nothing if one of them is not plain, or does not belong to a tensor of `num_dims` on `num_axes` axes. Dims
// are counted from 0.
std::optional<std::vector<Placement>> plain_placements(py::handle sequence, size_t num_axes,
                                                       int64_t num_dims) {
  auto placements = known_placements(sequence, num_axes, num_dims);
  const auto is_for_us = [num_dims](const Placement& placement) {
    return placement.split_factor == 1 &&
           (!placement.is_shard() || (placement.dim >= 0 && placement.dim < num_dims));
  };
  return placements.has_value() && std::ranges::all_of(*placements, is_for_us) ? placements : std::nullopt;
}

// What a DTensor is, as values; nothing if it is for PyTorch.
struct Parts {
  SpecObjects objects;
  py::object meta;
  KnownMesh* known;
  std::vector<Placement> placements;
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;

  int64_t num_dims() const { return static_cast<int64_t>(shape.size()); }
};

std::optional<Parts> parts_of(py::handle spec) {
  Parts parts{SpecObjects(spec), attribute<"tensor_meta">(spec), nullptr, {}, {}, {}};
  if (parts.meta.is_none() || !read_ints(attribute<"shape">(parts.meta), parts.shape) ||
      !read_ints(attribute<"stride">(parts.meta), parts.stride)) {
    return std::nullopt;
  }
  parts.known = &known_mesh(parts.objects.mesh);
  const auto placements =
      plain_placements(parts.objects.placements, parts.known->mesh.num_axes(), parts.num_dims());
  if (!parts.known->coordinate.has_value() || !placements.has_value()) {
    return std::nullopt;
  }
  parts.placements = *placements;
  return is_default(to_shard_order(parts.objects.order)) ? std::optional(std::move(parts)) : std::nullopt;
}

Dtype dtype_of(const at::Tensor& tensor) { return static_cast<Dtype>(tensor.scalar_type()); }

py::object replicate() {
  static auto* const placement =
      py::module::import("torch.distributed.tensor").attr("Replicate")().release().ptr();
  return py::reinterpret_borrow<py::object>(placement);
}

// `placements`, as objects and values, with Replicate on the axes for which `is_whole` says so.
template <typename IsWhole>
py::object with_replicate(const py::object& placements, size_t num_axes, const IsWhole& is_whole) {
  py::object changed;
  for (size_t axis = 0; axis < num_axes; ++axis) {
    if (is_whole(axis)) {
      if (!changed) {
        changed = py::list(placements);
      }
      py::reinterpret_borrow<py::list>(changed)[axis] = replicate();
    }
  }
  return changed ? py::object(py::tuple(changed)) : placements;
}

// Where a gradient goes unless the caller says otherwise: it is whole where its tensor is partial.
py::object gradient_placements(const py::object& placements, const std::vector<Placement>& values) {
  return with_replicate(placements, values.size(), [&](size_t axis) { return values[axis].is_partial(); });
}

// A sequence of placements, or None for those of the tensor; what else is passed PyTorch refuses.
bool is_sequence_or_none(py::handle placements) {
  return placements.is_none() || PyTuple_Check(placements.ptr()) || PyList_Check(placements.ptr());
}

py::object as_tuple(py::handle sequence) {
  return sequence.is_none() ? py::none()
                            : py::object(py::tuple(py::reinterpret_borrow<py::object>(sequence)));
}

class FromLocalGradient final : public Gradient {
 public:
  explicit FromLocalGradient(py::object grad_placements) : placements_(std::move(grad_placements)) {}
  const char* name() const override { return "funcol::from_local"; }

  py::object of(const py::object& gradient) const override {
    if (is_dtensor(gradient) && !observes_redistribution()) {
      if (const auto moved = redistribute(gradient, *placements_, /*async_op=*/false)) {
        if (auto local = to_local(moved, py::none())) {
          return local;
        }
      }
    }
    return callback(Callback::kGradientOfFromLocal)(gradient, *placements_);
  }
  std::vector<uint64_t> key() const override { return {placements_.hash()}; }

 private:
  Held placements_;
};

py::object wrap_local(const at::Tensor& local, py::handle spec, const py::object& grad_placements) {
  const auto held = py::reinterpret_steal<py::object>(THPVariable_Wrap(local.detach()));
  auto dtensor = make_dtensor(held.ptr(), spec);
  if (is_recorded(local)) {
    record<FromLocalGradient>(local, dtensor, grad_placements);
  }
  return dtensor;
}

class ToLocalGradient final : public Gradient {
 public:
  ToLocalGradient(py::object spec, py::object grad_placements)
      : spec_(std::move(spec)), placements_(std::move(grad_placements)) {}
  const char* name() const override { return "funcol::to_local"; }

  py::object of(const py::object& gradient) const override {
    const auto parts = parts_of(*spec_);
    if (parts.has_value() && is_plain(gradient) && is_unwatched(gradient)) {
      const auto& local = THPVariable_Unpack(gradient.ptr());
      const auto objects = (*placements_).is_none()
                               ? gradient_placements(parts->objects.placements, parts->placements)
                               : *placements_;
      const auto placements = plain_placements(objects, parts->placements.size(), parts->num_dims());
      if (placements.has_value() && local.dim() == parts->num_dims()) {
        TensorMeta meta{parts->shape, stride_of_whole(local, *placements, parts->shape, parts->known->mesh),
                        dtype_of(local)};
        const auto spec = interned_spec(parts->objects.mesh, *placements, std::move(meta));
        return wrap_local(local, spec, gradient_placements(attribute<"placements">(spec), *placements));
      }
    }
    return callback(Callback::kGradientOfToLocal)(gradient, *spec_, *placements_);
  }
  std::vector<uint64_t> key() const override { return {spec_.hash(), placements_.hash()}; }

 private:
  Held spec_;
  Held placements_;
};

class RedistributeGradient final : public Gradient {
 public:
  RedistributeGradient(py::object spec, bool async_op) : spec_(std::move(spec)), async_op_(async_op) {}
  const char* name() const override { return "funcol::redistribute"; }

  py::object of(const py::object& gradient) const override {
    if (is_dtensor(gradient)) {
      const auto source = parts_of(*spec_);
      const auto held = parts_of(attribute<"_spec">(gradient));
      if (source.has_value() && held.has_value() &&
          attribute<"dtype">(held->meta).is(attribute<"dtype">(source->meta))) {
        const auto wanted =
            with_replicate(source->objects.placements, held->placements.size(), [&](size_t axis) {
              return source->placements[axis].is_partial() && !held->placements[axis].is_partial();
            });
        if (auto result = redistribute(gradient, wanted, async_op_)) {
          return result;
        }
      }
    }
    return callback(Callback::kGradientOfRedistribute)(gradient, *spec_, async_op_);
  }
  std::vector<uint64_t> key() const override { return {spec_.hash(), async_op_ ? 1U : 0U}; }

 private:
  Held spec_;
  bool async_op_;
};

// nn.Parameter marks DTensors so, as it does other subclasses.
bool is_parameter(py::handle tensor) {
  static auto* const name = PyUnicode_InternFromString("_is_param");
  auto** const attributes = _PyObject_GetDictPtr(tensor.ptr());
  if (attributes == nullptr || *attributes == nullptr) {
    return false;
  }
  auto* const mark = PyDict_GetItemWithError(*attributes, name);
  return mark != nullptr && PyObject_IsTrue(mark) == 1;
}

// A DTensor, its local tensor and its spec, if they are for the functions here.
struct Plain {
  explicit Plain(py::handle dtensor) {
    if (is_dtensor(dtensor) && is_unwatched(dtensor)) {
      local = attribute<"_local_tensor">(dtensor);
      is_for_us = is_plain(local);
    }
  }

  const at::Tensor& tensor() const { return THPVariable_Unpack(local.ptr()); }

  py::object local;
  bool is_for_us = false;
};

}  // namespace

py::object to_local(py::handle dtensor, py::handle grad_placements) {
  const Plain plain(dtensor);
  if (!plain.is_for_us || !is_sequence_or_none(grad_placements)) {
    return {};
  }
  auto result = plain.local;
  if (at::GradMode::is_enabled()) {
    result = fresh_view(plain.tensor());
    const auto& tensor = THPVariable_Unpack(dtensor.ptr());
    if (is_recorded(tensor)) {
      record<ToLocalGradient>(tensor, result, attribute<"_spec">(dtensor), as_tuple(grad_placements));
    }
  }
  if (is_parameter(dtensor) && !is_parameter(result)) {
    if (result.is(plain.local)) {
      result = fresh_view(plain.tensor());
    }
    result.attr("_is_param") = true;
  }
  return result;
}

py::object from_local(py::handle local, py::handle device_mesh, py::handle placements, py::handle shape,
                      py::handle stride, py::handle grad_placements) {
  if (!THPVariable_CheckExact(local.ptr()) || !is_plain(local) || !is_unwatched(local)) {
    return {};
  }
  const auto& tensor = THPVariable_Unpack(local.ptr());
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.layout() != at::kStrided) {
    return {};
  }
  const auto device_type = attribute<"device_type">(device_mesh).cast<std::string>();
  if (!tensor.is_meta() && c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true) != device_type) {
    return {};
  }
  const auto& known = known_mesh(device_mesh);
  if (!known.coordinate.has_value()) {
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
    meta.stride = stride_of_whole(tensor, *values, meta.shape, known.mesh);
  }
  const auto spec = interned_spec(device_mesh, *values, std::move(meta));
  const auto gradients = grad_placements.is_none()
                             ? gradient_placements(attribute<"placements">(spec), *values)
                             : as_tuple(grad_placements);
  return wrap_local(tensor, spec, gradients);
}

py::object redistribute(py::handle dtensor, py::handle placements, bool async_op) {
  const Plain plain(dtensor);
  if (!plain.is_for_us) {
    return {};
  }
  const auto spec = attribute<"_spec">(dtensor);
  auto source = parts_of(spec);
  if (!source.has_value()) {
    return {};
  }
  const auto wanted = plain_placements(placements, source->placements.size(), source->num_dims());
  if (!wanted.has_value()) {
    return {};
  }
  py::object result;
  if (*wanted == source->placements) {
    result = make_dtensor(plain.local.ptr(), copy_spec(spec));
  } else {
    const auto& local = plain.tensor();
    const auto dtype = attribute<"dtype">(source->meta);
    TargetKey key{{source->known->id,
                   {std::move(source->placements), to_shard_order(source->objects.order)},
                   {*wanted, {}},
                   std::move(source->shape),
                   static_cast<int64_t>(local.itemsize()),
                   {},
                   {}},
                  std::move(source->stride),
                  dtype.ptr()};
    const auto target = find_target(std::move(key), spec, source->objects.mesh, *source->known, placements);
    if (!target.execution->fits(local)) {
      return {};
    }
    at::Tensor moved;
    {
      const WithoutGil no_gil;
      moved = target.execution->run(local, async_op);
    }
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(moved)));
    result = make_dtensor(object.ptr(), target.spec);
  }
  const auto& tensor = THPVariable_Unpack(dtensor.ptr());
  if (is_recorded(tensor)) {
    record<RedistributeGradient>(tensor, result, spec, async_op);
  }
  return result;
}

py::object full_tensor(py::handle dtensor, py::handle grad_placements) {
  const Plain plain(dtensor);
  if (!plain.is_for_us || !is_sequence_or_none(grad_placements)) {
    return {};
  }
  const auto num_axes = py::len(attribute<"placements">(attribute<"_spec">(dtensor)));
  py::tuple placements(num_axes);
  for (size_t axis = 0; axis < num_axes; ++axis) {
    placements[axis] = replicate();
  }
  const auto whole = redistribute(dtensor, placements, /*async_op=*/false);
  if (!whole) {
    return {};
  }
  auto result = to_local(whole, grad_placements);
  return result && result.is(plain.local) ? fresh_view(plain.tensor()) : result;
}

}  // namespace funcol::python
