// What FSDP2 does for each parameter of a group, a call for the whole group: see
// python/funcol/fully_shard.py.
//
// NotImplemented is given before anything has happened, for what PyTorch's own function has to do: where a
// mode or transform of PyTorch is active, a method of FSDP2's classes has been replaced, a parameter is of an
// uncommon kind.
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <ATen/record_function.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "async/async_tensor.h"
#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "bindings/fully_shard_objects.h"
#include "bindings/python_args.h"
#include "bindings/without_gil.h"

namespace funcol::python {

// FSDP2's objects

bool FullyShard::Member::is_there() const {
  auto* const now = PyType_Check(owner) ? _PyType_Lookup(reinterpret_cast<PyTypeObject*>(owner), name)
                                        : PyDict_GetItemWithError(owner, name);
  return now == value;
}

FullyShard& fully_shard() {
  static auto* const known = new FullyShard;  // NOLINT
  return *known;
}

bool can_serve() {
  const auto& members = fully_shard().members;
  return !is_observed() &&
         std::all_of(members.begin(), members.end(), [](const auto& member) { return member.is_there(); });
}

std::optional<Fields> usual(PyObject* object, const PyTypeObject* type) {
  if (Py_TYPE(object) != type) {
    return std::nullopt;
  }
  Fields fields(object);
  const auto& methods = fully_shard().methods;
  const bool has_own = std::any_of(methods.begin(), methods.end(),
                                   [&](auto* name) { return fields.find(name).ptr() != nullptr; });
  return has_own ? std::nullopt : std::optional(std::move(fields));
}

std::optional<Params> usual_params(PyObject* list) {
  if (list == nullptr || !PyList_CheckExact(list)) {
    return std::nullopt;
  }
  Params params;
  params.reserve(PyList_GET_SIZE(list));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    auto param = usual(PyList_GET_ITEM(list, i), fully_shard().param);
    if (!param) {
      return std::nullopt;
    }
    params.push_back(*std::move(param));
  }
  return params;
}

std::optional<Group> usual_group(PyObject* object) {
  auto fields = can_serve() ? usual(object, fully_shard().group) : std::nullopt;
  auto params = fields ? usual_params(fields->find<"fsdp_params">().ptr()) : std::nullopt;
  return params ? std::optional(Group{*std::move(fields), *std::move(params)}) : std::nullopt;
}

int64_t to_int(PyObject* object) {
  const auto number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return number;
}

std::vector<int64_t> to_ints(PyObject* sequence) {
  const auto list = checked(PySequence_Fast(sequence, "sizes"));
  std::vector<int64_t> result(PySequence_Fast_GET_SIZE(list.ptr()));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = to_int(PySequence_Fast_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
  }
  return result;
}

bool is_cut_along_dim_0(const Fields& param) {
  const auto dim = attribute<"dim">(param.get<"fsdp_placement">());
  return PyLong_Check(dim.ptr()) && to_int(dim.ptr()) == 0;
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

bool is_small_on_cpu(const at::Tensor& buffer) {
  constexpr int64_t kSmallCopy = 1 << 18;
  return buffer.is_cpu() && buffer.is_contiguous() && buffer.numel() <= kSmallCopy && !is_pending(buffer);
}

namespace {

// Gather

// (params): the flat shards to gather, the type to gather them in, and what AllGatherResult keeps of them:
// types and lengths in a list a parameter, and all lengths.
PyObject* fsdp_shards(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_shards");
  const auto params = can_serve() ? usual_params(args[0]) : std::nullopt;
  if (!params || params->empty()) {
    return not_implemented();
  }
  const auto& known = fully_shard();
  py::list shards(params->size());
  py::list types(params->size());
  py::list lengths(params->size());
  py::list all_lengths(params->size());
  py::object type_of_all;
  for (size_t i = 0; i < params->size(); ++i) {
    const auto& param = (*params)[i];
    const bool is_post_forward = param.is<"sharded_state">(known.sharded_post_forward.ptr());
    if (!(is_post_forward || param.is<"sharded_state">(known.sharded.ptr())) ||
        !param.is<"offload_to_cpu">(Py_False) ||
        find_attribute<"fsdp_pre_all_gather">(attribute<"_local_tensor">(param.get<"sharded_param">()))) {
      return not_implemented();
    }
    auto shard = is_post_forward ? param.get<"_sharded_post_forward_param_data">()
                                 : param.get<"_sharded_param_data">();
    const auto* const tensor = plain_tensor(shard.ptr());
    if (tensor == nullptr || !tensor->is_contiguous() || tensor->is_meta()) {
      return not_implemented();
    }
    auto type = param.get<"param_dtype">();
    if (type.is_none()) {
      type = py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor->scalar_type())));
    }
    if (type_of_all && !type_of_all.is(type)) {
      return not_implemented();  // Several types travel as bytes.
    }
    type_of_all = type;
    py::object length = py::int_(tensor->numel());
    py::list one_type(1);
    one_type[0] = std::move(type);
    py::list one_length(1);
    one_length[0] = length;
    shards[i] = std::move(shard);
    types[i] = std::move(one_type);
    lengths[i] = std::move(one_length);
    all_lengths[i] = std::move(length);
  }
  return py::make_tuple(shards, type_of_all, types, lengths, all_lengths).release().ptr();
  END_HANDLE_TH_ERRORS
}

// (shards, output, lengths, rank): the part of `output` that this rank sends, which has the shards now.
PyObject* fsdp_copy_in(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 4, "fsdp_copy_in");
  const auto& output = THPVariable_Unpack(args[1]);
  const auto lengths = to_ints(args[2]);
  const auto num_sent = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  std::vector<at::Tensor> shards;
  bool is_same_memory = plain_tensor(args[1]) != nullptr && is_small_on_cpu(output);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    shards.push_back(THPVariable_Unpack(PyList_GET_ITEM(args[0], i)));
    settle(shards.back());
    is_same_memory &= shards.back().is_cpu() && shards.back().scalar_type() == output.scalar_type();
  }
  auto sent = output.narrow(0, num_sent * to_int(args[3]), num_sent);
  {
    const WithoutGil without_gil;
    if (is_same_memory) {
      auto* to = bytes_of(sent);
      for (const auto& shard : shards) {
        if (shard.nbytes() > 0) {
          std::memcpy(to, shard.const_data_ptr(), shard.nbytes());
        }
        to += shard.nbytes();
      }
    } else {
      at::_foreach_copy_(at::split_with_sizes(sent, lengths), shards);
    }
  }
  return THPVariable_Wrap(std::move(sent));
  END_HANDLE_TH_ERRORS
}

void resize_storage(const py::object& tensor, bool allocate) {
  const auto& value = THPVariable_Unpack(tensor.ptr());
  if (value.is_cpu() && plain_tensor(tensor.ptr()) != nullptr) {
    const auto num_bytes = allocate ? value.nbytes() : 0;
    if (value.storage().nbytes() != num_bytes) {
      at::native::resize_bytes_nocuda(value.storage(), c10::SymInt(static_cast<int64_t>(num_bytes)));
    }
  } else {
    const auto& known = fully_shard();
    checked(PyObject_CallOneArg(allocate ? known.alloc_storage : known.free_storage, tensor.ptr()));
  }
}

// The gathered tensor of each parameter, made if there is none yet; empty if one is of an uncommon kind.
class GatheredTensors {
 public:
  GatheredTensors(const Params& params, PyObject* types, PyObject* lengths, const at::Tensor& buffer,
                  int64_t num_ranks)
      : params_(params), types_(types), lengths_(lengths), buffer_(buffer), num_ranks_(num_ranks) {}

  bool find() {
    for (auto* const list : {types_, lengths_}) {
      if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(params_.size())) {
        return false;
      }
    }
    auto* const type = reinterpret_cast<PyObject*>(torch::getTHPDtype(buffer_.scalar_type()));
    int64_t num_gathered = 0;
    for (size_t i = 0; i < params_.size(); ++i) {
      const auto& param = params_[i];
      const auto index = static_cast<Py_ssize_t>(i);
      const auto inputs = to_ints(PyList_GET_ITEM(lengths_, index));
      const auto outputs = param.get<"all_gather_outputs">();
      if (inputs.size() != 1 || inputs[0] == 0 ||
          !checked(PySequence_GetItem(PyList_GET_ITEM(types_, index), 0)).is(py::handle(type)) ||
          !is_cut_along_dim_0(param) || !PyList_CheckExact(outputs.ptr()) ||
          PyList_GET_SIZE(outputs.ptr()) > 1) {
        return false;
      }
      py::object output;
      if (PyList_GET_SIZE(outputs.ptr()) == 1) {
        output = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(outputs.ptr(), 0));
        const auto* const tensor = plain_tensor(output.ptr());
        if (tensor == nullptr || tensor->is_inference() || !tensor->is_contiguous() ||
            tensor->scalar_type() != buffer_.scalar_type() || tensor->device() != buffer_.device() ||
            tensor->numel() != inputs[0] * num_ranks_ || is_pending(*tensor)) {
          return false;
        }
      }
      num_gathered += inputs[0] * num_ranks_;
      shard_lengths_.push_back(inputs[0]);
      outputs_.push_back(std::move(output));
    }
    return num_gathered == buffer_.numel();
  }

  void fill() {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (!outputs_[i]) {
        outputs_[i] = py::reinterpret_steal<py::object>(
            THPVariable_Wrap(at::empty({shard_lengths_[i] * num_ranks_}, buffer_.options())));
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

 private:
  void copy_memory() const {
    const auto item_size = static_cast<int64_t>(buffer_.element_size());
    const auto* from = static_cast<const std::byte*>(buffer_.const_data_ptr());
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      for (size_t i = 0; i < tensors_.size(); ++i) {
        const auto num_bytes = shard_lengths_[i] * item_size;
        std::memcpy(bytes_of(tensors_[i]) + rank * num_bytes, from, num_bytes);
        from += num_bytes;
      }
    }
  }

  // Below autograd: what it saved of the gathered tensors is good again now, so their versions stay.
  void copy_tensors() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<at::Tensor> rows;
    for (const auto& tensor : tensors_) {
      rows.push_back(tensor.view({num_ranks_, -1}));
    }
    at::split_with_sizes_copy_out(rows, buffer_.view({num_ranks_, -1}), shard_lengths_, 1);
  }

  const Params& params_;
  PyObject* types_;
  PyObject* lengths_;
  const at::Tensor& buffer_;
  int64_t num_ranks_;
  std::vector<int64_t> shard_lengths_;
  std::vector<py::object> outputs_;
  std::vector<at::Tensor> tensors_;
};

// (params, buffer, types, lengths, num_ranks): the gathered buffer cut into the parameters' gathered tensors.
PyObject* fsdp_copy_out(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 5, "fsdp_copy_out");
  const auto params = can_serve() ? usual_params(args[0]) : std::nullopt;
  const auto* const buffer = plain_tensor(args[1]);
  if (!params || buffer == nullptr || !buffer->is_contiguous() || buffer->is_meta()) {
    return not_implemented();
  }
  settle(*buffer);
  GatheredTensors gathered(*params, args[2], args[3], *buffer, to_int(args[4]));
  if (!gathered.find()) {
    return not_implemented();
  }
  gathered.fill();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Which parameters modules have

// A module's own setter is asked; PyTorch's would do no more than this.
void put_on_module(PyObject* module, PyObject* name, PyObject* param) {
  static auto* const setter_name = PyUnicode_InternFromString("__setattr__");
  static auto* const params_name = PyUnicode_InternFromString("_parameters");
  const auto dict = checked(PyObject_GenericGetDict(module, nullptr));
  auto* const params = PyDict_GetItemWithError(dict.ptr(), params_name);
  const bool is_plain = params != nullptr && PyDict_GetItemWithError(dict.ptr(), setter_name) == nullptr &&
                        _PyType_Lookup(Py_TYPE(module), setter_name) == fully_shard().set_attribute;
  const auto failed =
      is_plain ? PyObject_SetItem(params, name, param) : PyObject_SetAttr(module, name, param);
  if (failed != 0) {
    throw py::error_already_set();
  }
}

// On every module that shares it.
void put_on_modules(const Fields& fsdp_param, const py::object& param) {
  const auto info = fsdp_param.get<"_module_info">();
  put_on_module(attribute<"module">(info).ptr(), attribute<"param_name">(info).ptr(), param.ptr());
  const auto modules = attribute<"shared_modules">(info);
  if (PyList_Size(modules.ptr()) == 0) {
    return;
  }
  const auto names = attribute<"shared_param_names">(info);
  for (Py_ssize_t i = 0; i < std::min(PyList_Size(modules.ptr()), PyList_Size(names.ptr())); ++i) {
    put_on_module(checked(PySequence_GetItem(modules.ptr(), i)).ptr(),
                  checked(PySequence_GetItem(names.ptr(), i)).ptr(), param.ptr());
  }
}

void free_storages(const py::object& tensors) {
  for (Py_ssize_t i = 0; i < PyList_Size(tensors.ptr()); ++i) {
    resize_storage(checked(PySequence_GetItem(tensors.ptr(), i)), /*allocate=*/false);
  }
}

// (group)
PyObject* fsdp_to_sharded(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_to_sharded");
  auto* const sharded = fully_shard().sharded.ptr();
  const auto group = usual_group(args[0]);
  if (!group) {
    return not_implemented();
  }
  if (group->fields.is<"_sharded_state">(sharded)) {
    Py_RETURN_NONE;
  }
  for (const auto& param : group->params) {
    put_on_modules(param, param.get<"sharded_param">());
    const auto keeps_storage = param.find<"keep_unsharded_storage">();
    if (!keeps_storage || PyObject_IsTrue(keeps_storage.ptr()) == 0) {
      free_storages(param.get<"all_gather_outputs">());
      free_storages(param.get<"_unsharded_inner_tensors">());
    }
    param.set<"sharded_state">(sharded);
  }
  group->fields.set<"_sharded_state">(sharded);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (group)
PyObject* fsdp_to_unsharded(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_to_unsharded");
  const auto& known = fully_shard();
  const auto group = usual_group(args[0]);
  if (!group) {
    return not_implemented();
  }
  if (group->fields.is<"_sharded_state">(known.unsharded.ptr())) {
    Py_RETURN_NONE;
  }
  for (const auto& param : group->params) {
    const auto unsharded = param.get<"_unsharded_param">();
    const auto needs_gradient = attribute<"requires_grad">(param.get<"sharded_param">());
    if (!attribute<"requires_grad">(unsharded).is(needs_gradient)) {
      unsharded.attr("requires_grad_")(needs_gradient);
    }
    put_on_modules(param, unsharded);
    if (param.is<"sharded_state">(known.sharded_post_forward.ptr())) {
      param.set<"_sharded_post_forward_param">(Py_None);
      param.set<"_sharded_post_forward_param_data">(Py_None);
    }
    param.set<"sharded_state">(known.unsharded.ptr());
  }
  group->fields.set<"_sharded_state">(known.unsharded.ptr());
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (param class, group class, (sharded, sharded post forward, unsharded), (alloc_storage, free_storage),
// nn.Module.__setattr__, members): members are triples of what has a __dict__, a name in it, and
// the value there.
PyObject* know_fully_shard(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 6, "know_fully_shard");
  auto& known = fully_shard();
  const auto kept = [](const py::object& object) { return py::object(object).release().ptr(); };
  const auto item = [](PyObject* tuple, Py_ssize_t i) { return checked(PySequence_GetItem(tuple, i)); };
  known.param = reinterpret_cast<PyTypeObject*>(Py_NewRef(args[0]));
  known.group = reinterpret_cast<PyTypeObject*>(Py_NewRef(args[1]));
  known.sharded = kept(item(args[2], 0));
  known.sharded_post_forward = kept(item(args[2], 1));
  known.unsharded = kept(item(args[2], 2));
  known.alloc_storage = kept(item(args[3], 0));
  known.free_storage = kept(item(args[3], 1));
  known.set_attribute = Py_NewRef(args[4]);
  known.members.clear();
  known.methods.clear();
  for (Py_ssize_t i = 0; i < PySequence_Size(args[5]); ++i) {
    const auto member = item(args[5], i);
    const auto owner = item(member.ptr(), 0);
    const auto value = item(member.ptr(), 2);
    const auto name = item(member.ptr(), 1);
    const bool is_module = PyModule_Check(owner.ptr());
    known.members.push_back(
        {kept(is_module ? attribute<"__dict__">(owner) : owner), kept(name), kept(value)});
    if (!is_module && PyFunction_Check(value.ptr())) {
      known.methods.push_back(known.members.back().name);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Whether ranges of record_function have somebody who sees them.
PyObject* is_recorded(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyBool_FromLong(at::hasCallbacks() || is_observed() ? 1 : 0);
}

}  // namespace

void bind_fully_shard(PyObject* module) {
  static PyMethodDef functions[] = {fast<know_fully_shard>("know_fully_shard"),
                                    fast<fsdp_shards>("fsdp_shards"),
                                    fast<fsdp_copy_in>("fsdp_copy_in"),
                                    fast<fsdp_copy_out>("fsdp_copy_out"),
                                    fast<fsdp_to_sharded>("fsdp_to_sharded"),
                                    fast<fsdp_to_unsharded>("fsdp_to_unsharded"),
                                    {"is_recorded", is_recorded, METH_NOARGS, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};
  for (auto* const some : {functions, gradient_functions()}) {
    if (PyModule_AddFunctions(module, some) != 0) {
      throw python_error();
    }
  }
}

}  // namespace funcol::python
