#include "fsdp/gather.h"

#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "async/async_tensor.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {

std::optional<Shards> find_shards(const Params& params) {
  if (params.empty()) {
    return std::nullopt;
  }
  const auto& known = fully_shard();
  Shards shards;
  for (const auto& param : params) {
    const bool is_post_forward = param.is<"sharded_state">(known.sharded_post_forward.ptr());
    if (!(is_post_forward || param.is<"sharded_state">(known.sharded.ptr())) ||
        find_attribute<"fsdp_pre_all_gather">(local_tensor_of(param))) {
      return std::nullopt;
    }
    const auto shard = is_post_forward ? param.get<"_sharded_post_forward_param_data">()
                                       : param.get<"_sharded_param_data">();
    const auto* const tensor = dense_tensor(shard);
    if (tensor == nullptr) {
      return std::nullopt;
    }
    const auto type = param.get<"param_dtype">();
    shards.tensors.push_back(*tensor);
    shards.types.push_back(type.is_none() ? tensor->scalar_type() : to_dtype(type));
  }
  const bool is_uniform = std::ranges::count(shards.types, shards.types[0]) == std::ssize(shards.types);
  shards.dtype = is_uniform ? shards.types[0] : at::kByte;
  for (size_t i = 0; i < shards.tensors.size(); ++i) {
    const auto size = is_uniform ? 1 : static_cast<int64_t>(c10::elementSize(shards.types[i]));
    shards.lengths.push_back(shards.tensors[i].numel() * size);
    shards.length += shards.lengths.back();
  }
  return shards;
}

ListedShards::ListedShards(const Shards& shards) {
  const auto in_list = [](const py::object& item) {
    py::list list;
    list.append(item);
    return list;
  };
  for (size_t i = 0; i < shards.tensors.size(); ++i) {
    types.append(in_list(to_python(shards.types[i])));
    lengths.append(in_list(py::int_(shards.tensors[i].numel())));
    all_lengths.append(shards.lengths[i]);
  }
}

namespace {

// Returns `shard` on the device of the gather, as bytes if several dtypes travel.
at::Tensor as_sent(const at::Tensor& shard, at::ScalarType type, const at::Tensor& output) {
  auto sent = shard.device() == output.device()
                  ? shard
                  : shard.to(at::TensorOptions().device(output.device()), /*non_blocking=*/true);
  return output.scalar_type() == at::kByte && type != at::kByte ? sent.to(type).view(at::kByte) : sent;
}

}  // namespace

at::Tensor copy_in(const Shards& shards, const at::Tensor& output, int64_t rank) {
  bool is_same_memory = is_small_on_cpu(output);
  for (size_t i = 0; i < shards.tensors.size(); ++i) {
    const auto& shard = shards.tensors[i];
    settle(shard);
    is_same_memory &= shard.is_cpu() && shard.scalar_type() == shards.types[i];
  }
  const WithoutGil without_gil;
  auto sent = [&] {
    const at::AutoDispatchBelowADInplaceOrView without_gradients;
    return output.narrow(0, shards.length * rank, shards.length);
  }();
  if (is_same_memory) {
    auto* to = bytes_of(sent);
    for (const auto& shard : shards.tensors) {
      if (shard.nbytes() > 0) {
        std::memcpy(to, shard.const_data_ptr(), shard.nbytes());
      }
      to += shard.nbytes();
    }
  } else {
    std::vector<at::Tensor> sources;
    for (size_t i = 0; i < shards.tensors.size(); ++i) {
      sources.push_back(as_sent(shards.tensors[i], shards.types[i], output));
    }
    at::_foreach_copy_(at::split_with_sizes(sent, shards.lengths), sources);
  }
  return sent;
}

namespace {

void resize_storage(const py::object& tensor, bool allocate) {
  const auto* const plain = plain_tensor(tensor.ptr());
  if (plain != nullptr && plain->is_cpu()) {
    const auto num_bytes = allocate ? plain->nbytes() : 0;
    if (plain->storage().nbytes() != num_bytes) {
      at::native::resize_bytes_nocuda(plain->storage(), c10::SymInt(static_cast<int64_t>(num_bytes)));
    }
  } else {
    const auto& known = fully_shard();
    checked(PyObject_CallOneArg(allocate ? known.alloc_storage : known.free_storage, tensor.ptr()));
  }
}

}  // namespace

bool GatheredTensors::find() {
  for (auto* const list : {types_, lengths_}) {
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(params_.size())) {
      return false;
    }
  }
  const bool is_bytes = buffer_.scalar_type() == at::kByte;
  int64_t num_gathered = 0;  // in bytes
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = params_[i];
    const auto index = static_cast<Py_ssize_t>(i);
    const auto inputs = to_ints(PyList_GET_ITEM(lengths_, index));
    const auto outputs = param.get<"all_gather_outputs">();
    const auto type = to_dtype(checked(PySequence_GetItem(PyList_GET_ITEM(types_, index), 0)));
    if (inputs.size() != 1 || inputs[0] == 0 || !(is_bytes || type == buffer_.scalar_type()) ||
        !is_cut_along_dim_0(param) || !PyList_CheckExact(outputs.ptr()) ||
        PyList_GET_SIZE(outputs.ptr()) > 1) {
      return false;
    }
    py::object output;
    if (PyList_GET_SIZE(outputs.ptr()) == 1) {
      output = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(outputs.ptr(), 0));
      const auto* const tensor = plain_tensor(output.ptr());
      if (tensor == nullptr || tensor->is_inference() || !tensor->is_contiguous() ||
          tensor->scalar_type() != type || tensor->device() != buffer_.device() ||
          tensor->numel() != inputs[0] * num_ranks_ || is_pending(*tensor)) {
        return false;
      }
    }
    num_gathered += inputs[0] * num_ranks_ * static_cast<int64_t>(c10::elementSize(type));
    dtypes_.push_back(type);
    shard_lengths_.push_back(inputs[0]);
    outputs_.push_back(std::move(output));
  }
  return num_gathered == static_cast<int64_t>(buffer_.nbytes());
}

void GatheredTensors::fill() {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (!outputs_[i]) {
      outputs_[i] =
          to_python(at::empty({shard_lengths_[i] * num_ranks_}, buffer_.options().dtype(dtypes_[i])));
      py::list listed(1);
      listed[0] = outputs_[i];
      params_[i].set<"all_gather_outputs">(listed.ptr());
    }
    resize_storage(outputs_[i], /*allocate=*/true);
    tensors_.push_back(THPVariable_Unpack(outputs_[i].ptr()));
  }
  const WithoutGil without_gil;
  is_small_on_cpu(buffer_) ? copy_memory() : copy_tensors();
}

void GatheredTensors::copy_memory() const {
  const auto* from = static_cast<const std::byte*>(buffer_.const_data_ptr());
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto num_bytes = static_cast<int64_t>(tensors_[i].nbytes()) / num_ranks_;
      std::memcpy(bytes_of(tensors_[i]) + rank * num_bytes, from, num_bytes);
      from += num_bytes;
    }
  }
}

// Copies below autograd, so that the tensors keep their versions, and autograd's saved references stay valid.
void GatheredTensors::copy_tensors() const {
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<at::Tensor> rows;
  std::vector<int64_t> lengths;  // in elements of the buffer
  for (const auto& tensor : tensors_) {
    rows.push_back(tensor.view({num_ranks_, -1}).view(buffer_.scalar_type()));
    lengths.push_back(rows.back().size(1));
  }
  at::split_with_sizes_copy_out(rows, buffer_.view({num_ranks_, -1}), lengths, 1);
}

namespace {

// Does setattr(module, name, param). Skips nn.Module.__setattr__, which would do the same; calls a module's
// own setter.
void set_on_module(PyObject* module, PyObject* name, PyObject* param) {
  auto* const setter_name = interned<"__setattr__">();
  const auto dict = checked(PyObject_GenericGetDict(module, nullptr));
  auto* const params = PyDict_GetItemWithError(dict.ptr(), interned<"_parameters">());
  const bool is_plain = params != nullptr && PyDict_GetItemWithError(dict.ptr(), setter_name) == nullptr &&
                        _PyType_Lookup(Py_TYPE(module), setter_name) == fully_shard().module_setattr;
  const auto failed =
      is_plain ? PyObject_SetItem(params, name, param) : PyObject_SetAttr(module, name, param);
  if (failed != 0) {
    throw py::error_already_set();
  }
}

// Sets the parameter on every module that shares it.
void set_on_modules(const Fields& fsdp_param, const py::object& param) {
  const auto info_object = fsdp_param.get<"_module_info">();
  const Fields info(info_object.ptr());
  set_on_module(info.get<"module">().ptr(), info.get<"param_name">().ptr(), param.ptr());
  const auto modules = info.get<"shared_modules">();
  if (PyList_Size(modules.ptr()) == 0) {
    return;
  }
  const auto names = info.get<"shared_param_names">();
  for (Py_ssize_t i = 0; i < std::min(PyList_Size(modules.ptr()), PyList_Size(names.ptr())); ++i) {
    set_on_module(checked(PySequence_GetItem(modules.ptr(), i)).ptr(),
                  checked(PySequence_GetItem(names.ptr(), i)).ptr(), param.ptr());
  }
}

void free_storages(const py::object& tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
    resize_storage(checked(PySequence_GetItem(tensors.ptr(), i)), /*allocate=*/false);
  }
}

}  // namespace

void to_sharded(const Group& group) {
  auto* const sharded = fully_shard().sharded.ptr();
  if (group.fields.is<"_sharded_state">(sharded)) {
    return;
  }
  for (const auto& param : group.params) {
    set_on_modules(param, param.get<"sharded_param">());
    const auto keeps_storage = param.find<"keep_unsharded_storage">();
    if (!keeps_storage || !param.is_true<"keep_unsharded_storage">()) {
      free_storages(param.get<"all_gather_outputs">());
    }
    param.set<"sharded_state">(sharded);
  }
  group.fields.set<"_sharded_state">(sharded);
}

void to_unsharded(const Group& group) {
  const auto& known = fully_shard();
  if (group.fields.is<"_sharded_state">(known.unsharded.ptr())) {
    return;
  }
  for (const auto& param : group.params) {
    const auto unsharded = param.get<"_unsharded_param">();
    const auto needs_gradient = THPVariable_Unpack(param.get<"sharded_param">().ptr()).requires_grad();
    if (THPVariable_Unpack(unsharded.ptr()).requires_grad() != needs_gradient) {
      unsharded.attr("requires_grad_")(needs_gradient);
    }
    set_on_modules(param, unsharded);
    if (param.is<"sharded_state">(known.sharded_post_forward.ptr())) {
      param.set<"_sharded_post_forward_param">(Py_None);
      param.set<"_sharded_post_forward_param_data">(Py_None);
    }
    param.set<"sharded_state">(known.unsharded.ptr());
  }
  group.fields.set<"_sharded_state">(known.unsharded.ptr());
}

py::object fsdp_shards(py::handle fsdp_params) {
  const auto params = fast_path_params(fsdp_params, "foreach_all_gather");
  const auto found = params ? find_shards(*params) : std::nullopt;
  if (!found) {
    return {};
  }
  const ListedShards listed(*found);
  return py::make_tuple(to_python(found->dtype), listed.types, listed.lengths, listed.all_lengths);
}

py::object fsdp_copy_in(py::handle fsdp_params, py::handle output, int64_t rank) {
  const auto shards = find_shards(param_fields(fsdp_params)).value();
  return to_python(copy_in(shards, THPVariable_Unpack(output.ptr()), rank));
}

py::object fsdp_copy_out(py::handle fsdp_params, py::handle gathered_buffer, py::handle types,
                         py::handle lengths, int64_t num_ranks) {
  const auto params = fast_path_params(fsdp_params, "_default_all_gather_output_fn");
  const auto* const buffer = dense_tensor(gathered_buffer);
  if (!params || buffer == nullptr) {
    return {};
  }
  GatheredTensors gathered(*params, types.ptr(), lengths.ptr(), *buffer, num_ranks);
  if (!gathered.find()) {
    return {};
  }
  settle(*buffer);
  gathered.fill();
  return py::none();
}

py::object fsdp_to_sharded(py::handle fsdp_group) {
  const auto group = fast_path_group(fsdp_group, "FSDPParamGroup._to_sharded");
  if (!group || !free_gathered_only(group->params)) {
    return {};
  }
  to_sharded(*group);
  return py::none();
}

py::object fsdp_to_unsharded(py::handle fsdp_group) {
  const auto group = fast_path_group(fsdp_group, "FSDPParamGroup._to_unsharded");
  if (!group) {
    return {};
  }
  to_unsharded(*group);
  return py::none();
}

}  // namespace funcol::python
