#include "bindings/dtensor_calls.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "async/layers.h"
#include "bindings/dtensor_objects.h"
#include "bindings/python_args.h"
#include "bindings/python_specs.h"
#include "bindings/without_gil.h"
#include "compat/autograd_node.h"
#include "layout/layout.h"

namespace funcol::python {
namespace {

namespace compiled = torch::dynamo::autograd;
using torch::autograd::variable_list;

// A Python object that a node holds, and which is let go of wherever the node goes.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  ~Held() {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      object_ = py::object();
    } else {
      object_.release();
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  const py::object& operator*() const { return object_; }
  // Equal objects have the same one.
  uint64_t hash() const {
    const auto value = PyObject_Hash(object_.ptr());
    if (value == -1) {
      throw py::error_already_set();
    }
    return static_cast<uint64_t>(value);
  }

 private:
  py::object object_;
};

// What a node does to the gradient. Needs the GIL.
class Gradient {
 public:
  Gradient() = default;
  virtual ~Gradient() = default;
  Gradient(const Gradient&) = delete;
  Gradient& operator=(const Gradient&) = delete;

  virtual const char* name() const = 0;
  virtual py::object of(const py::object& gradient) const = 0;
  // What tells this gradient from others of its name.
  virtual std::vector<uint64_t> key() const = 0;
};
using GradientPtr = std::shared_ptr<const Gradient>;

at::Tensor run(const Gradient& gradient, const at::Tensor& of) {
  if (!of.defined()) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  try {
    const auto result = gradient.of(py::reinterpret_steal<py::object>(THPVariable_Wrap(of)));
    return THPVariable_Unpack(result.ptr());
  } catch (py::error_already_set& error) {
    error.restore();
    python_error kept;
    kept.persist();
    throw kept;
  }
}

// A node with one input and one output. Compiled autograd takes it as a function that it looks into.
class Node final : public torch::autograd::Node {
 public:
  explicit Node(GradientPtr gradient) : gradient_(std::move(gradient)) {}

  variable_list apply(variable_list&& gradients) override { return {run(*gradient_, gradients[0])}; }
  std::string name() const override { return gradient_->name(); }

  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    for (const uint64_t part : gradient_->key()) {
      args.collect(part);
    }
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 compiled::SwapSavedVariables& saved) override {
    const auto& compiler = compiled::getPyCompilerInterface();
    const auto function = compiler->bind_function(
        saved.get_py_compiler(), name(),
        [gradient = gradient_](const variable_list& inputs, const std::vector<c10::IValue>& /*args*/) {
          return variable_list{run(*gradient, inputs[0])};
        },
        {}, /*is_custom_function=*/true, /*is_traceable=*/true);
    return compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, gradients, {},
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges())));
  }

 private:
  GradientPtr gradient_;
};

bool is_recorded(const at::Tensor& input) { return at::GradMode::is_enabled() && input.requires_grad(); }

template <typename GradientType, typename... Args>
void record(const at::Tensor& input, const py::object& output, Args&&... args) {
  auto node = compat::make_node<Node>(std::make_shared<const GradientType>(std::forward<Args>(args)...));
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(THPVariable_Unpack(output.ptr()), node);
}

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

std::vector<int64_t> dense_stride(const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  std::vector<int64_t> stride(shape.size());
  int64_t step = 1;
  for (const auto dim : std::views::reverse(order)) {
    stride[dim] = step;
    step *= std::max<int64_t>(shape[dim], 1);
  }
  return stride;
}

// As PyTorch has it: what lies further apart than the elements of a dim that is cut does so by as much more
// as there are shards.
std::vector<int64_t> spread_stride(at::IntArrayRef stride, const std::vector<Placement>& placements,
                                   const Mesh& mesh) {
  auto whole = stride.vec();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard()) {
      const auto of_dim = whole[placements[axis].dim];
      for (size_t dim = 0; dim < whole.size(); ++dim) {
        if (static_cast<int64_t>(dim) != placements[axis].dim && whole[dim] >= of_dim) {
          whole[dim] *= mesh.sizes[axis];
        }
      }
    }
  }
  return whole;
}

// How a tensor of `shape` lies in memory that lies as `local` does on each rank. Dims of size 1 have the
// strides that PyTorch gives them.
//
// Worked case: a transposed local (3, 4) with stride (1, 3), S(0) on 2 ranks, shape (5, 4): (1, 5).
std::vector<int64_t> stride_of_whole(const at::Tensor& local, const std::vector<Placement>& placements,
                                     const std::vector<int64_t>& shape, const Mesh& mesh) {
  const auto stride = local.strides();
  if (!local.is_contiguous() && !local.is_non_overlapping_and_dense()) {
    return spread_stride(stride, placements, mesh);
  }
  std::vector<int64_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (!local.is_contiguous()) {
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return stride[a] > stride[b]; });
  }
  auto whole = dense_stride(shape, order);
  if (std::ranges::find(shape, 1) != shape.end()) {
    const auto spread = spread_stride(stride, placements, mesh);
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      whole[dim] = shape[dim] == 1 ? spread[dim] : whole[dim];
    }
  }
  return whole;
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

// A function of funcol.dtensor, which does in Python what is not done here.
template <typename... Args>
py::object in_python(const char* name, Args&&... args) {
  return py::module::import("funcol.dtensor").attr(name)(std::forward<Args>(args)...);
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
    return in_python("_gradient_from_local", gradient, *placements_);
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
    return in_python("_gradient_to_local", gradient, *spec_, *placements_);
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
    return in_python("_gradient_of_redistribute", gradient, *spec_, async_op_);
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
