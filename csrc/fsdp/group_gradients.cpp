#include "fsdp/group_gradients.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>

#include "async/async_tensor.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {

std::optional<Gradients> take_gradients(const Group& group) {
  // In either case PyTorch's function reduces zeros in the place of a missing gradient.
  if (!group.fields.is<"_partial_reduce_output">(Py_None) ||
      !group.fields.is<"reduce_scatter_unused_params">(Py_False)) {
    return std::nullopt;
  }
  Gradients taken;
  for (const auto index : to_ints(group.fields.get<"_reduce_scatter_param_indices">().ptr())) {
    const auto& param = group.params.at(index);
    const auto unsharded = param.find<"_unsharded_param">();
    if (!unsharded) {
      continue;
    }
    const auto& tensor = THPVariable_Unpack(unsharded.ptr());
    if (!tensor.grad().defined()) {
      continue;
    }
    const bool is_dtensor = param.is<"is_dtensor">(Py_True) || param.is<"is_spmd_types">(Py_True);
    taken.tensors.append(is_dtensor ? attribute<"unsharded_grad_data">(param.object())
                                    : to_python(tensor.grad()));
    taken.params.append(param.object());
    tensor.mutable_grad().reset();
  }
  return taken;
}

namespace {

bool is_common_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

// Returns the dtype in which gradients accumulate. PyTorch counterpart: FSDPParam.unsharded_grad_dtype.
py::object accumulated_type(const Fields& param) {
  if (!param.is<"reduce_dtype">(Py_None)) {
    return param.get<"reduce_dtype">();
  }
  return param.is_true<"_has_sharded_grad_dtype_override">() ? param.get<"sharded_grad_dtype">()
                                                             : param.get<"orig_dtype">();
}

}  // namespace

py::object common_accumulated_type(const Gradients& taken) {
  py::object common;
  for (size_t i = 0; i < taken.params.size(); ++i) {
    auto type = accumulated_type(Fields(taken.params[i].ptr()));
    if (type.is_none()) {
      type = to_python(THPVariable_Unpack(py::object(taken.tensors[i]).ptr()).scalar_type());
    }
    if (common && !common.is(type)) {
      return {};
    }
    common = std::move(type);
  }
  return common;
}

void set_gradient_types(const Fields& group, bool deferred) {
  const auto params = group.get<"_fsdp_params_with_wider_grad_dtype">();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params.ptr()); ++i) {
    const Fields param(PyList_GET_ITEM(params.ptr(), i));
    const auto unsharded = py::reinterpret_borrow<py::object>(param.find<"_unsharded_param">());
    if (!unsharded || !THPVariable_Unpack(unsharded.ptr()).requires_grad()) {
      continue;
    }
    const auto& gradient = THPVariable_Unpack(unsharded.ptr()).grad();
    if (deferred) {
      if (gradient.defined() || group.is_true<"reduce_grads">()) {
        set_attribute<"grad_dtype">(unsharded, Py_None);
      }
      continue;
    }
    const auto type = accumulated_type(param);
    if (gradient.defined() && !type.is_none() && gradient.scalar_type() != to_dtype(type)) {
      set_attribute<"grad">(unsharded, attribute<"to">(to_python(gradient))(type));
    }
    set_attribute<"grad_dtype">(unsharded, type);
  }
}

std::optional<std::vector<at::Tensor>> plain_gradients(const py::list& gradients, at::ScalarType type,
                                                       int64_t num_ranks) {
  if (num_ranks < 1) {
    return std::nullopt;
  }
  std::vector<at::Tensor> result;
  for (const auto gradient : gradients) {
    const auto* const tensor = plain_tensor(gradient.ptr());
    if (tensor == nullptr || !tensor->is_cpu() || tensor->dim() == 0 || !tensor->is_contiguous() ||
        tensor->is_conj() || tensor->is_neg()) {
      return std::nullopt;
    }
    const bool is_cast = is_common_float(tensor->scalar_type()) && is_common_float(type);
    if (tensor->scalar_type() != type && !is_cast) {
      return std::nullopt;
    }
    result.push_back(*tensor);
  }
  return result;
}

namespace {

template <typename To, typename From>
void cast(std::byte* to, const std::byte* from, int64_t count) {
  const auto* const values = reinterpret_cast<const From*>(from);
  auto* const cast_values = reinterpret_cast<To*>(to);
  constexpr int64_t kBlock = 64;  // of a known size, so that compilers vectorize it
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int64_t k = 0; k < kBlock; ++k) {
      cast_values[i + k] = static_cast<To>(values[i + k]);
    }
  }
  for (; i < count; ++i) {
    cast_values[i] = static_cast<To>(values[i]);
  }
}

// Copies `count` elements of the dtype `from_type` into memory of `to_type`. Both are common floats, or
// equal.
void copy_as(at::ScalarType to_type, std::byte* to, at::ScalarType from_type, const std::byte* from,
             int64_t count) {
  if (to_type == from_type) {
    if (count > 0) {
      std::memcpy(to, from, count * c10::elementSize(to_type));
    }
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, to_type, "fully_shard", [&] {
    using To = scalar_t;
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, from_type, "fully_shard",
                                    [&] { cast<To, scalar_t>(to, from, count); });
  });
}

int64_t rows_per_rank(const at::Tensor& gradient, int64_t num_ranks) {
  return (gradient.size(0) + num_ranks - 1) / num_ranks;
}

}  // namespace

int64_t padded_length(const at::Tensor& gradient, int64_t num_ranks) {
  const auto num_rows = gradient.size(0);
  return num_rows == 0 ? 0 : rows_per_rank(gradient, num_ranks) * num_ranks * (gradient.numel() / num_rows);
}

void copy_gradients_in(const std::vector<at::Tensor>& gradients, const at::Tensor& buffer,
                       int64_t num_ranks) {
  for (const auto& gradient : gradients) {
    settle(gradient);
  }
  const WithoutGil without_gil;
  const auto type = buffer.scalar_type();
  auto* to = bytes_of(buffer);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (const auto& gradient : gradients) {
      const auto num_rows = gradient.size(0);
      if (num_rows == 0) {
        continue;
      }
      const auto num_padded = rows_per_rank(gradient, num_ranks);
      const auto row_length = gradient.numel() / num_rows;
      const auto row_size = row_length * static_cast<int64_t>(buffer.element_size());
      const auto first = std::min(num_rows, rank * num_padded);
      const auto num_here = std::min(num_rows, first + num_padded) - first;
      const auto* const from = static_cast<const std::byte*>(gradient.const_data_ptr()) +
                               first * row_length * static_cast<int64_t>(gradient.element_size());
      copy_as(type, to, gradient.scalar_type(), from, num_here * row_length);
      std::memset(to + num_here * row_size, 0, (num_padded - num_here) * row_size);
      to += num_padded * row_size;
    }
  }
}

bool try_copy_gradients_in(const py::list& gradients, py::handle buffer, int64_t num_ranks) {
  const auto* const tensor = plain_tensor(buffer.ptr());
  const auto plain = tensor != nullptr && is_small_on_cpu(*tensor)
                         ? plain_gradients(gradients, tensor->scalar_type(), num_ranks)
                         : std::nullopt;
  if (!plain) {
    return false;
  }
  int64_t length = 0;
  for (const auto& gradient : *plain) {
    length += padded_length(gradient, num_ranks);
  }
  if (length != tensor->numel()) {
    return false;
  }
  copy_gradients_in(*plain, *tensor, num_ranks);
  return true;
}

bool gradients_are_dtensors(const Params& params) {
  return std::ranges::all_of(params, [](const Fields& param) {
    const auto& sum = THPVariable_Unpack(param.get<"sharded_param">().ptr()).grad();
    return !sum.defined() || Py_TYPE(to_python(sum).ptr()) == dtensor_type();
  });
}

namespace {

// Returns the spec of a gradient like `local`, or null if the parameter has none for its dtype yet.
py::object gradient_spec(const Fields& param, const at::Tensor& local) {
  if (const auto by_type = param.find<"_sharding_spec_by_dtype">()) {
    return py::reinterpret_borrow<py::object>(
        PyDict_GetItemWithError(by_type.ptr(), to_python(local.scalar_type()).ptr()));
  }
  return py::reinterpret_borrow<py::object>(param.find<"_sharding_spec">());
}

// Does param.grad = gradient, without the setter's checks if dtypes, devices, layouts and sizes agree.
void set_gradient(const py::object& param, const py::object& gradient) {
  const auto& tensor = THPVariable_Unpack(param.ptr());
  const auto& value = THPVariable_Unpack(gradient.ptr());
  if (tensor.scalar_type() == value.scalar_type() && tensor.device() == value.device() &&
      tensor.layout() == value.layout() && tensor.sizes() == value.sizes()) {
    tensor.mutable_grad() = value;
  } else {
    set_attribute<"grad">(param, gradient);
  }
}

PyObject* hooks_after_accumulation(const py::object& param) {
  auto* const hooks = reinterpret_cast<THPVariable*>(param.ptr())->post_accumulate_grad_hooks;
  return hooks != nullptr && PyObject_IsTrue(hooks) == 1 ? hooks : nullptr;
}

// Copies the shard of a gradient to the CPU, where the parameter is. The copy overlaps with later work unless
// it is read within the backward pass: by an addition or a hook.
at::Tensor offloaded(const Fields& fsdp_param, const at::Tensor& shard,
                     const std::function<py::object()>& record_event) {
  const auto param = fsdp_param.get<"sharded_param">();
  const bool overlaps = fsdp_param.is_true<"pin_memory">() &&
                        !THPVariable_Unpack(param.ptr()).grad().defined() &&
                        hooks_after_accumulation(param) == nullptr;
  auto copied = shard.to(at::TensorOptions().device(at::kCPU), overlaps);
  if (overlaps) {
    fsdp_param.set<"grad_offload_event">(record_event().ptr());
  }
  return copied;
}

// Adds `local` to the gradient of a sharded parameter, or makes it the gradient, and runs the parameter's
// post-accumulate-grad hooks.
void accumulate_one(const Fields& fsdp_param, const py::object& local) {
  const auto param = fsdp_param.get<"sharded_param">();
  const auto& sum = THPVariable_Unpack(param.ptr()).grad();
  if (!sum.defined()) {
    const auto& shard = THPVariable_Unpack(local.ptr());
    const auto& sharded = THPVariable_Unpack(param.ptr());
    const auto spec = gradient_spec(fsdp_param, shard);
    const auto gradient = spec ? to_python(make_dtensor(shard, spec, {sharded.sizes(), sharded.strides()},
                                                        shard.requires_grad()))
                               : fsdp_param.object().attr("to_sharded_dtensor")(local);
    set_gradient(param, gradient);
  } else {
    const auto total = to_python(sum);
    const auto added = checked(PyNumber_InPlaceAdd(attribute<"_local_tensor">(total).ptr(), local.ptr()));
    set_attribute<"_local_tensor">(total, added);
  }
  if (auto* const hooks = hooks_after_accumulation(param)) {
    for (const auto hook : py::list(py::handle(hooks).attr("values")())) {
      hook(param);
    }
  }
}

// Returns a view below autograd: the results of a reduction are not differentiated.
at::Tensor shard_of(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                    int64_t offset) {
  const at::AutoDispatchBelowAutograd without_gradients;
  return at::as_strided(buffer, sizes, strides, offset);
}

}  // namespace

void accumulate(const at::Tensor& buffer, std::span<const Fields> params, std::span<const int64_t> lengths,
                const std::function<py::object()>& record_event) {
  auto offset = buffer.storage_offset();
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i];
    auto local = shard_of(buffer, to_ints(param.get<"sharded_size">().ptr()),
                          to_ints(param.get<"contiguous_sharded_stride">().ptr()), offset);
    if (!param.is<"offload_to_cpu">(Py_False)) {
      local = offloaded(param, local, record_event);
    }
    accumulate_one(param, to_python(local));
    offset += lengths[i];
  }
}

py::object fsdp_take_gradients(py::handle fsdp_group) {
  const auto group = fast_path_group(fsdp_group, "FSDPParamGroup._take_unsharded_grads_to_reduce");
  const auto taken = group ? take_gradients(*group) : std::nullopt;
  return taken ? py::make_tuple(taken->params, taken->tensors) : py::object();
}

py::object fsdp_padded_sizes(py::handle fsdp_params, py::handle gradients, int64_t num_ranks) {
  const auto size_type = imported<"torch", "Size">();
  const auto params = fast_path_params(fsdp_params, "_default_reduce_scatter_input_fn");
  if (!params || num_ranks < 1 || !PyList_CheckExact(gradients.ptr()) ||
      PyList_GET_SIZE(gradients.ptr()) != static_cast<Py_ssize_t>(params->size())) {
    return {};
  }
  py::tuple result(params->size());
  for (size_t i = 0; i < params->size(); ++i) {
    const auto* const gradient = plain_tensor(PyList_GET_ITEM(gradients.ptr(), static_cast<Py_ssize_t>(i)));
    if (gradient == nullptr || gradient->dim() == 0 || !is_cut_along_dim_0((*params)[i])) {
      return {};
    }
    py::tuple sizes(gradient->dim());
    for (int64_t dim = 0; dim < gradient->dim(); ++dim) {
      sizes[dim] = py::int_(dim > 0 ? gradient->size(dim) : rows_per_rank(*gradient, num_ranks) * num_ranks);
    }
    result[i] = checked(PyObject_CallOneArg(size_type.ptr(), sizes.ptr()));
  }
  return result;
}

py::object fsdp_gradient_type(py::handle fsdp_params) {
  const auto params = fast_path_params(fsdp_params, "_cast_and_view_sharded_grads");
  if (!params || params->empty() || !gradients_are_dtensors(*params)) {
    return {};
  }
  auto type = params->front().get<"sharded_grad_dtype">();
  const bool is_common = std::ranges::all_of(*params, [&](const Fields& param) {
    return param.is<"sharded_grad_dtype">(type.ptr()) && param.is<"offload_to_cpu">(Py_False);
  });
  return is_common ? type : py::object();
}

py::object fsdp_sharded_dtensor(py::handle fsdp_param, py::handle local_object) {
  const auto* const local = plain_tensor(local_object.ptr());
  const auto& methods = bypassed_methods("FSDPParam.to_sharded_dtensor").of_param;
  const auto param =
      fast_path_is_enabled() ? find_unmodified(fsdp_param.ptr(), fully_shard().param, methods) : std::nullopt;
  if (local == nullptr || !param || to_ints(param->get<"sharded_size">().ptr()) != local->sizes()) {
    return {};
  }
  const auto spec = gradient_spec(*param, *local);
  return spec ? make_dtensor(local_object.ptr(), spec, local->requires_grad()) : py::object();
}

py::object fsdp_accumulate(py::handle buffer, py::handle fsdp_params, py::handle sizes, int64_t num_ranks) {
  const auto padded = checked(PySequence_Fast(sizes.ptr(), "padded sizes"));
  std::vector<int64_t> lengths;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(fsdp_params.ptr()); ++i) {
    const auto sizes = to_ints(PySequence_Fast_GET_ITEM(padded.ptr(), i));
    lengths.push_back(c10::multiply_integers(sizes) / num_ranks);
  }
  accumulate(THPVariable_Unpack(buffer.ptr()), param_fields(fsdp_params), lengths);
  return py::none();
}

py::object fsdp_reduce_copy_in(py::handle gradients, py::handle buffer, int64_t num_ranks) {
  const bool is_done = fast_path_is_enabled() && PyList_CheckExact(gradients.ptr()) &&
                       try_copy_gradients_in(py::reinterpret_borrow<py::list>(gradients), buffer, num_ranks);
  return is_done ? py::none() : py::object();
}

}  // namespace funcol::python
