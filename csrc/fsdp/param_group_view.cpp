#include "fsdp/param_group_view.h"

#include <algorithm>

#include "async/async_tensor.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/layouts.h"

namespace funcol::python {

bool FullyShard::Member::is_unchanged() const {
  auto* const now = PyType_Check(owner) ? _PyType_Lookup(reinterpret_cast<PyTypeObject*>(owner), name)
                                        : PyDict_GetItemWithError(owner, name);
  return now == value;
}

namespace {

uint64_t version_of_owner(PyObject* owner) {
  return PyType_Check(owner) ? version_of(reinterpret_cast<const PyTypeObject*>(owner)) : version_of(owner);
}

}  // namespace

FullyShard::Members::Members(std::vector<Member> members) : members_(std::move(members)) {
  for (const auto& member : members_) {
    if (std::ranges::find(owners_, member.owner, &Owner::object) == owners_.end()) {
      owners_.push_back({member.owner});
    }
  }
}

bool FullyShard::Members::are_unchanged() {
  const bool are_as_before = std::ranges::all_of(owners_, [](const Owner& owner) {
    return owner.version != 0 && owner.version == version_of_owner(owner.object);
  });
  if (!are_as_before) {
    all_are_ = std::ranges::all_of(members_, &Member::is_unchanged);
    for (auto& owner : owners_) {
      owner.version = version_of_owner(owner.object);
    }
  }
  return all_are_;
}

FullyShard& fully_shard() {
  static auto* const known = new FullyShard;  // NOLINT
  return *known;
}

bool fast_path_is_enabled() { return !is_observed() && fully_shard().bypassed.are_unchanged(); }

std::optional<Fields> find_unmodified(PyObject* object, const PyTypeObject* type,
                                      const FullyShard::Names& methods) {
  if (Py_TYPE(object) != type) {
    return std::nullopt;
  }
  Fields fields(object);
  const bool has_own =
      std::ranges::any_of(methods, [&](auto* name) { return static_cast<bool>(fields.find(name)); });
  return has_own ? std::nullopt : std::optional(std::move(fields));
}

Params param_fields(py::handle list) {
  Params params;
  for (const auto param : list) {
    params.emplace_back(param.ptr());
  }
  return params;
}

std::optional<Params> unmodified_params(PyObject* list, ReplacedFunction function) {
  if (list == nullptr || !PyList_CheckExact(list)) {
    return std::nullopt;
  }
  const auto& methods = bypassed_methods(function).of_param;
  Params params;
  params.reserve(PyList_GET_SIZE(list));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    auto param = find_unmodified(PyList_GET_ITEM(list, i), fully_shard().param, methods);
    if (!param) {
      return std::nullopt;
    }
    params.push_back(*std::move(param));
  }
  return params;
}

std::optional<Fields> unmodified_group_fields(PyObject* object, ReplacedFunction function) {
  return find_unmodified(object, fully_shard().group, bypassed_methods(function).of_group);
}

std::optional<Group> unmodified_group(PyObject* object, ReplacedFunction function) {
  auto fields = unmodified_group_fields(object, function);
  auto params = fields ? unmodified_params(fields->find<"fsdp_params">().ptr(), function) : std::nullopt;
  return params ? std::optional(Group{*std::move(fields), *std::move(params)}) : std::nullopt;
}

std::optional<Params> fast_path_params(py::handle list, ReplacedFunction function) {
  return fast_path_is_enabled() ? unmodified_params(list.ptr(), function) : std::nullopt;
}

std::optional<Group> fast_path_group(py::handle object, ReplacedFunction function) {
  return fast_path_is_enabled() ? unmodified_group(object.ptr(), function) : std::nullopt;
}

int64_t to_int(PyObject* object) {
  const auto number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return number;
}

std::vector<int64_t> to_ints(PyObject* sequence) {
  // A torch.Size is a tuple: no need to make a list of it.
  const auto list = PyTuple_Check(sequence) ? py::reinterpret_borrow<py::object>(sequence)
                                            : checked(PySequence_Fast(sequence, "sizes"));
  std::vector<int64_t> result(PySequence_Fast_GET_SIZE(list.ptr()));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = to_int(PySequence_Fast_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
  }
  return result;
}

bool is_cut_along_dim_0(const Fields& param) {
  const auto placement = param.get<"fsdp_placement">();
  if (const auto dim = dim_of_shard(placement)) {
    return *dim == 0;
  }
  const auto dim = attribute<"dim">(placement);
  return PyLong_Check(dim.ptr()) && to_int(dim.ptr()) == 0;
}

py::object local_tensor_of(const Fields& param) {
  const auto sharded = param.get<"sharded_param">();
  auto* const local = Py_TYPE(sharded.ptr()) == dtensor_type() ? local_of(sharded.ptr()) : nullptr;
  return local != nullptr ? py::reinterpret_borrow<py::object>(local) : attribute<"_local_tensor">(sharded);
}

bool has_extension(const Params& params) {
  return std::ranges::any_of(params, [](const auto& param) {
    const auto local = local_tensor_of(param);
    return find_attribute<"fsdp_post_all_gather">(local) || find_attribute<"fsdp_pre_all_gather">(local);
  });
}

bool free_gathered_only(const Params& params) {
  return std::ranges::all_of(params, [](const auto& param) {
    const auto inner = param.template find<"_unsharded_inner_tensors">();
    const auto gathered = param.template find<"all_gather_outputs">();
    return inner && PyList_CheckExact(inner.ptr()) && PyList_GET_SIZE(inner.ptr()) == 0 && gathered &&
           PyList_CheckExact(gathered.ptr());
  });
}

const at::Tensor* dense_tensor(py::handle object) {
  const auto* const tensor = plain_tensor(object.ptr());
  return tensor != nullptr && tensor->is_contiguous() && !tensor->is_meta() ? tensor : nullptr;
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

bool is_small_on_cpu(const at::Tensor& buffer) {
  constexpr int64_t kSmallCopy = 1 << 18;
  return buffer.is_cpu() && !buffer.key_set().has(c10::DispatchKey::Python) && buffer.is_contiguous() &&
         buffer.numel() <= kSmallCopy && !is_pending(buffer);
}

}  // namespace funcol::python
