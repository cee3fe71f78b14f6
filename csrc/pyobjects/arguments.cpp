#include "pyobjects/arguments.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "async/dispatch_modes.h"
#include "comm/group_ref.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "pyobjects/attributes.h"
#include "pyobjects/checked_types.h"
#include "pyobjects/dtensors.h"

namespace funcol::python {

namespace {

// Returns true for the mode of torch.set_default_device() and `with torch.device(...)`.
bool is_device_mode(PyObject* mode) {
  return py::type::handle_of(mode).is(imported<"torch.utils._device", "DeviceContext">());
}

}  // namespace

bool has_function_mode() {
  if (!at::impl::torch_function_mode_enabled()) {
    return false;
  }
  using Modes = at::impl::PythonTorchFunctionTLS;
  for (int64_t i = 0; i < Modes::stack_len(); ++i) {
    auto* const mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (!is_device_mode(mode) && !is_idle_type_checker(mode)) {
      return true;
    }
  }
  return false;
}

bool is_observed() { return has_active_layers() || has_function_mode(); }

const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) {
    return nullptr;
  }
  const auto& tensor = THPVariable_Unpack(object);
  return belongs_to_layer(tensor) ? nullptr : &tensor;
}

namespace {

PyObject* group_resolver = nullptr;

bool overrides_torch_function(PyObject* object) {
  return PyObject_HasAttrString(object, "__torch_function__") != 0;
}

void check_tensor(PyObject* object, const char* op) {
  TORCH_CHECK_TYPE(THPVariable_Check(object) || overrides_torch_function(object), "funcol::", op, ": got a ",
                   type_name(object), " where a tensor belongs.");
}

std::optional<std::string_view> string_view(PyObject* object) {
  if (!PyUnicode_Check(object)) {
    return std::nullopt;
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) {
    throw py::error_already_set();
  }
  return std::string_view(text, size);
}

// Returns the C++ object of a pybind11 instance; null if it is of another type.
template <typename T>
T* instance(PyObject* object) {
  py::detail::type_caster_base<T> caster;
  return caster.load(object, /*convert=*/false) ? static_cast<T*>(caster) : nullptr;
}

std::optional<c10d::ReduceOp> reduce_op_object(PyObject* object) {
  if (auto* reduce_op = instance<c10d::ReduceOp>(object)) {
    return *reduce_op;
  }
  if (auto* kind = instance<c10d::ReduceOp::RedOpType>(object)) {
    TORCH_CHECK_VALUE(*kind != c10d::ReduceOp::PREMUL_SUM,
                      "funcol: ReduceOp.PREMUL_SUM needs its factor. Pass the "
                      "ReduceOp that torch.distributed._make_nccl_premul_sum(factor) returns.");
    return c10d::ReduceOp(*kind);
  }
  return std::nullopt;
}

}  // namespace

GroupPtr group_object(PyObject* object) {
  // Does for the class itself what instance() does, at a fraction of its cost.
  static const auto* const type = py::type::of<c10d::ProcessGroup>().ptr();
  auto* group = reinterpret_cast<PyObject*>(Py_TYPE(object)) == type
                    ? static_cast<c10d::ProcessGroup*>(
                          reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder().value_ptr())
                    : instance<c10d::ProcessGroup>(object);
  return GroupPtr::unsafe_reclaim_from_nonowning(group);
}

void refuse_dtensor(PyObject* object, const char* op) {
  const auto is_dtensor = [&] {
    // Compares names first: looking up the class imports it.
    return std::string_view(Py_TYPE(object)->tp_name) == "DTensor" && Py_TYPE(object) == dtensor_type();
  };
  TORCH_CHECK_TYPE(THPVariable_CheckExact(object) || !THPVariable_Check(object) || !is_dtensor(),
                   "funcol::", op, ": x is a DTensor: use redistribute(), or pass x.to_local().");
}

at::Tensor tensor_argument(PyObject* object, const char* op) {
  check_tensor(object, op);
  const auto* tensor = is_observed() ? nullptr : plain_tensor(object);
  return tensor == nullptr ? at::Tensor() : *tensor;
}

bool tensors_argument(PyObject* sequence, std::vector<at::Tensor>& tensors, const char* op) {
  if (!(PyList_Check(sequence) || PyTuple_Check(sequence))) {
    TORCH_CHECK_TYPE(overrides_torch_function(sequence) && !THPVariable_Check(sequence), "funcol::", op,
                     ": the inputs are a ", type_name(sequence), ". Expected a list of tensors.");
    return false;
  }
  const auto count = PySequence_Fast_GET_SIZE(sequence);
  tensors.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* const object = PySequence_Fast_GET_ITEM(sequence, i);
    check_tensor(object, op);
    const auto* tensor = is_observed() ? nullptr : plain_tensor(object);
    if (tensor == nullptr) {
      return false;
    }
    tensors.push_back(*tensor);
  }
  return true;
}

namespace {

// Checks all wrappers of a tensor: each functorch transform adds one, and any of them may have the tangent.
void check_no_tangents(py::object tensor, const char* op) {
  constexpr c10::DispatchKeySet kWrapped(
      {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  funcol::check_no_tangents(THPVariable_Unpack(tensor.ptr()), op);
  while (THPVariable_Unpack(tensor.ptr()).key_set().has_any(kWrapped)) {
    tensor = py::module_::import("torch._C._functorch").attr("get_unwrapped")(tensor);
    funcol::check_no_tangents(THPVariable_Unpack(tensor.ptr()), op);
  }
}

}  // namespace

void check_no_tangents(PyObject* const* objects, Py_ssize_t count, const char* op) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (THPVariable_Check(objects[i])) {
      check_no_tangents(py::reinterpret_borrow<py::object>(objects[i]), op);
    }
  }
}

bool can_bypass_dispatcher(at::TensorList tensors) {
  const bool records = at::GradMode::is_enabled();
  return std::ranges::none_of(tensors, [&](const at::Tensor& tensor) {
    return tensor.is_meta() || (records && tensor.requires_grad());
  });
}

bool is_shape_only(at::TensorList tensors, PyObject* group) {
  const bool are_meta =
      !tensors.empty() && std::ranges::all_of(tensors, [](const auto& tensor) { return tensor.is_meta(); });
  const auto name = are_meta ? string_view(group) : std::nullopt;
  return name.has_value() && !has_group_named(*name);
}

GroupPtr group_argument(PyObject* group, PyObject* tag, const char* op) {
  if (const auto name = string_view(group)) {
    return group_from_name(*name, op);
  }
  if (auto found = group_object(group)) {
    check_is_usable(found, op);
    return found;
  }
  const auto resolved =
      checked(PyObject_CallFunctionObjArgs(group_resolver, group, tag, py::str(op).ptr(), nullptr));
  if (const auto name = string_view(resolved.ptr())) {
    return group_from_name(*name, op);
  }
  auto found = group_object(resolved.ptr());
  TORCH_CHECK_TYPE(found.defined(), "funcol::", op, ": the group is a ", type_name(group),
                   ". Expected a ProcessGroup, a group name, a DeviceMesh, a (DeviceMesh, int or name) or a "
                   "list of ranks.");
  check_is_usable(found, op);
  return found;
}

void set_group_resolver(PyObject* resolver) {
  Py_INCREF(resolver);
  Py_XSETREF(group_resolver, resolver);
}

c10d::ReduceOp reduce_op_argument(PyObject* reduce_op, const char* op) {
  if (const auto name = string_view(reduce_op)) {
    return reduce_op_from_name(*name, op);
  }
  const auto found = reduce_op_object(reduce_op);
  TORCH_CHECK_TYPE(found.has_value(), "funcol::", op, ": the reduce op is a ", type_name(reduce_op),
                   ". Expected a name such as 'sum', or a torch.distributed.ReduceOp.");
  return *found;
}

int64_t int_argument(PyObject* value, const char* name, const char* op) {
  const auto number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "funcol::", op, ": ", name, " is a ", type_name(value), ". Expected an int.");
  }
  return number;
}

std::vector<int64_t> ints_argument(PyObject* values, const char* name, const char* op) {
  std::vector<int64_t> numbers;
  if (values == Py_None) {
    return numbers;
  }
  TORCH_CHECK_TYPE(PyList_Check(values) || PyTuple_Check(values), "funcol::", op, ": ", name, " is a ",
                   type_name(values), ". Expected a list of ints.");
  const auto count = PySequence_Fast_GET_SIZE(values);
  numbers.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    numbers.push_back(int_argument(PySequence_Fast_GET_ITEM(values, i), name, op));
  }
  return numbers;
}

SplitSizes::SplitSizes(PyObject* values, const char* op)
    : given_(values != Py_None), sizes_(ints_argument(values, "split_sizes", op)) {}

at::OptionalIntArrayRef SplitSizes::ints() const {
  return given_ ? at::OptionalIntArrayRef(sizes_) : at::OptionalIntArrayRef();
}

at::OptionalSymIntArrayRef SplitSizes::symints() const {
  return given_ ? at::OptionalSymIntArrayRef(c10::fromIntArrayRefSlow(sizes_)) : at::OptionalSymIntArrayRef();
}

}  // namespace funcol::python
