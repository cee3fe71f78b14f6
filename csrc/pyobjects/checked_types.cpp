#include "pyobjects/checked_types.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layout/cache.h"
#include "layout/word_key.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"

namespace funcol::python {
namespace {

constexpr size_t kNumFunctions = size_t{1} << 12;

// The kinds of calls, as python/funcol/installation/spmd_types_checks.py numbers them.
enum class CallKind : uint8_t { kUnchecked, kCached, kChecked };

// Returns the __dict__ of a tensor, where the package keeps types.
py::object dict_of(PyObject* tensor) { return checked(PyObject_GenericGetDict(tensor, nullptr)); }

PyObject* type_in(const py::object& dict) { return PyDict_GetItem(dict.ptr(), interned<"_local_type">()); }
PyObject* spec_in(const py::object& dict) {
  return PyDict_GetItem(dict.ptr(), interned<"_partition_spec">());
}

void set_in(const py::object& dict, PyObject* name, PyObject* value) {
  if (PyDict_SetItem(dict.ptr(), name, value) != 0) {
    throw py::error_already_set();
  }
}

// All that a check reads of a call. Objects that are compared by their address are held, so that no other
// object gets the address.
class CheckedCall : public WordKey {
 public:
  using WordKey::add;
  void add_object(PyObject* object) {
    add(reinterpret_cast<uintptr_t>(object));
    kept_objects_.push_back(py::reinterpret_borrow<py::object>(object));
  }

  // Adds a value. Returns false for an object that is not known to be one.
  bool add(PyObject* value);

  // Adds the types of a tensor.
  bool add_types(PyObject* tensor) {
    const auto dict = dict_of(tensor);
    const auto add_found = [&](PyObject* found) { return add(found == nullptr ? Py_None : found); };
    return add_found(type_in(dict)) && add_found(spec_in(dict));
  }

  // Returns the call's tensors, in order. Valid during the call.
  const std::vector<PyObject*>& tensors() const { return tensors_; }
  void forget_tensors() { tensors_.clear(); }

  size_t heap_bytes() const {
    return WordKey::heap_bytes() + kept_objects_.capacity() * sizeof(py::object) + kBlockBytes;
  }

 private:
  bool add_all(PyObject* const* values, Py_ssize_t count) {
    add(static_cast<uint64_t>(count));
    return std::all_of(values, values + count, [&](PyObject* value) { return add(value); });
  }
  bool add_items(PyObject* dict);
  bool add_tensor(PyObject* object);

  std::vector<py::object> kept_objects_;
  std::vector<PyObject*> tensors_;
};

bool CheckedCall::add(PyObject* value) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  add_object(type);
  if (THPVariable_Check(value)) {
    return add_tensor(value);
  }
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    add(static_cast<uint64_t>(PyLong_AsLongLongAndOverflow(value, &overflow)));
    return overflow == 0;
  }
  if (PyFloat_CheckExact(value)) {
    add(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    return true;
  }
  if (PyUnicode_CheckExact(value)) {
    PyObject* text = Py_NewRef(value);
    PyUnicode_InternInPlace(&text);
    add_object(text);
    Py_DECREF(text);
    return true;
  }
  static const auto spec = imported<"spmd_types.types", "PartitionSpec">();
  if (PyTuple_CheckExact(value) || PyList_CheckExact(value) || THPSize_Check(value) || spec.ptr() == type) {
    return add_all(PySequence_Fast_ITEMS(value), PySequence_Fast_GET_SIZE(value));
  }
  if (PyDict_CheckExact(value)) {
    return add_items(value);
  }
  if (PySlice_Check(value)) {
    const auto* const slice = reinterpret_cast<PySliceObject*>(value);
    return add(slice->start) && add(slice->stop) && add(slice->step);
  }
  if (THPDevice_Check(value)) {
    const auto device = reinterpret_cast<THPDevice*>(value)->device;
    add((static_cast<uint64_t>(device.type()) << 8U) | static_cast<uint8_t>(device.index()));
    return true;
  }
  static const auto shard = imported<"spmd_types.types", "Shard">();
  if (shard.ptr() == type) {
    return add(attribute<"dim">(value).ptr());
  }
  static const auto axis = imported<"spmd_types._mesh_axis", "MeshAxis">();
  static const auto group = imported<"torch.distributed", "ProcessGroup">();
  if (group.ptr() == type) {  // the package compares groups by their axes; a key does not keep a group alive
    return add(attribute<"of">(axis)(py::handle(value)).ptr());
  }
  static const auto enums = imported<"enum", "EnumMeta">();
  const bool is_itself = value == Py_None || PyBool_Check(value) || value == Py_Ellipsis ||
                         THPDtype_Check(value) || THPLayout_Check(value) || THPMemoryFormat_Check(value) ||
                         axis.ptr() == type || enums.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(type));
  if (is_itself) {
    add_object(value);
  }
  return is_itself;
}

bool CheckedCall::add_items(PyObject* dict) {
  add(static_cast<uint64_t>(PyDict_Size(dict)));
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &name, &value) != 0;) {
    if (!add(name) || !add(value)) {
      return false;
    }
  }
  return true;
}

bool CheckedCall::add_tensor(PyObject* object) {
  const auto* const tensor = plain_tensor(object);
  if (tensor == nullptr || tensor->layout() != at::kStrided ||
      tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return false;
  }
  tensors_.push_back(object);
  add((static_cast<uint64_t>(tensor->dim()) << 24U) | (static_cast<uint64_t>(tensor->scalar_type()) << 16U) |
      (static_cast<uint64_t>(tensor->device().type()) << 8U) |
      static_cast<uint64_t>(tensor->requires_grad()));
  for (const auto sizes : {tensor->sizes(), tensor->strides()}) {
    words.insert(words.end(), sizes.begin(), sizes.end());
  }
  return add_types(object);
}

// The effect of a check on a tensor of the result.
struct Leaf {
  int64_t ndim;
  int64_t same_as;  // the number of the call's tensor that it is; -1 for another one
  py::object type;  // null if there is none, as is `spec`
  py::object spec;
};

struct Outcome {
  bool is_tensor;  // not a sequence
  std::vector<Leaf> leaves;

  size_t heap_bytes() const {
    constexpr size_t kDictBytes = 232;
    return leaves.capacity() * (sizeof(Leaf) + kDictBytes) + kBlockBytes;
  }
};

// The tensors of a result: a tensor, a sequence of tensors, or an object without any.
struct Result {
  bool is_tensor;
  std::vector<PyObject*> tensors;
  bool is_plain;  // no tensor in it is of an uncommon class, and no container lies in another
};

Result tensors_of(PyObject* result) {
  if (THPVariable_Check(result)) {
    return {true, {result}, THPVariable_CheckExact(result)};
  }
  Result found{false, {}, !PyDict_Check(result)};
  if (PyTuple_Check(result) || PyList_Check(result)) {
    const std::span<PyObject*> items(PySequence_Fast_ITEMS(result),
                                     static_cast<size_t>(PySequence_Fast_GET_SIZE(result)));
    found.tensors.assign(items.begin(), items.end());
    found.is_plain = std::ranges::all_of(items, THPVariable_CheckExact);
  }
  return found;
}

int64_t place_in(const std::vector<PyObject*>& tensors, PyObject* tensor) {
  const auto found = std::ranges::find(tensors, tensor);
  return found == tensors.end() ? -1 : found - tensors.begin();
}

// Returns the types that a check gave to the tensors of a result; null for results of other kinds.
std::shared_ptr<const Outcome> outcome_of(PyObject* result, const CheckedCall& key) {
  const auto found = tensors_of(result);
  if (!found.is_plain) {
    return nullptr;
  }
  auto outcome = std::make_shared<Outcome>(Outcome{found.is_tensor, {}});
  for (auto* const tensor : found.tensors) {
    const auto dict = dict_of(tensor);
    auto* const type = type_in(dict);
    outcome->leaves.push_back({THPVariable_Unpack(tensor).dim(), place_in(key.tensors(), tensor),
                               type == nullptr ? py::object() : checked(PyDict_Copy(type)),
                               py::reinterpret_borrow<py::object>(spec_in(dict))});
  }
  return outcome;
}

// Gives the tensors of a result the types of an equal call. Returns false, with nothing done, if the result
// does not match that call's.
bool apply(const Outcome& outcome, PyObject* result, const CheckedCall& key) {
  const auto found = tensors_of(result);
  const auto matches = [&](PyObject* tensor, const Leaf& leaf) {
    return leaf.ndim == THPVariable_Unpack(tensor).dim() && leaf.same_as == place_in(key.tensors(), tensor) &&
           (leaf.same_as >= 0 || spec_in(dict_of(tensor)) == nullptr);
  };
  if (!found.is_plain || found.is_tensor != outcome.is_tensor ||
      !std::ranges::equal(found.tensors, outcome.leaves, matches)) {
    return false;
  }
  for (size_t i = 0; i < found.tensors.size(); ++i) {
    const auto& leaf = outcome.leaves[i];
    const auto dict = dict_of(found.tensors[i]);
    if (leaf.type) {
      set_in(dict, interned<"_local_type">(), checked(PyDict_Copy(leaf.type.ptr())).ptr());
    }
    if (leaf.spec) {
      set_in(dict, interned<"_partition_spec">(), leaf.spec.ptr());
    } else if (spec_in(dict) != nullptr) {
      PyDict_DelItem(dict.ptr(), interned<"_partition_spec">());
    }
  }
  return true;
}

// The checker and the calls remembered of it.
struct Memory {
  TypeChecker checker;
  std::unordered_map<PyObject*, std::pair<py::object, CallKind>> kinds;
  Cache<CheckedCall, std::shared_ptr<const Outcome>> calls{find_table("checked_types")};
  py::object entry;  // of the stack of meshes, and its number
  uint64_t entry_number = 0;
};

Memory& memory() {
  static auto* const memory = new Memory;  // NOLINT: never released, as Python may be gone first
  return *memory;
}

// Returns the kind of an attribute access, or of a function that is one object for the life of the process.
// The package checks others.
CallKind kind_of(PyObject* func) {
  if (Py_TYPE(func) == &_PyMethodWrapper_Type) {  // reads or sets an attribute
    const bool is_read = PyUnicode_CompareWithASCIIString(attribute<"__name__">(func).ptr(), "__get__") == 0;
    return is_read && PySet_Contains(memory().checker.getters.ptr(), attribute<"__self__">(func).ptr()) == 0
               ? CallKind::kUnchecked
               : CallKind::kChecked;
  }
  if (!PyCFunction_Check(func) && !PyFunction_Check(func) && Py_TYPE(func) != &PyMethodDescr_Type &&
      Py_TYPE(func) != &PyWrapperDescr_Type) {
    return CallKind::kChecked;
  }
  auto& kinds = memory().kinds;
  if (const auto found = kinds.find(func); found != kinds.end()) {
    return found->second.second;
  }
  if (kinds.size() == kNumFunctions) {
    kinds.clear();
  }
  const auto kind = static_cast<CallKind>(memory().checker.kind(py::handle(func)).cast<int>());
  kinds.emplace(func, std::pair(py::reinterpret_borrow<py::object>(func), kind));
  return kind;
}

// Returns the number of the current mesh, by value; 0 if there is none.
uint64_t number_of_mesh() {
  auto& known = memory();
  const auto stack = find_attribute<"mesh_stack">(known.checker.threads);
  if (!stack || !PyList_Check(stack.ptr()) || PyList_GET_SIZE(stack.ptr()) == 0) {
    return 0;
  }
  auto* const entry = PyList_GET_ITEM(stack.ptr(), PyList_GET_SIZE(stack.ptr()) - 1);
  if (known.entry.ptr() != entry) {
    const auto held = py::reinterpret_borrow<py::object>(entry);
    known.entry_number = known.checker.mesh(held).cast<uint64_t>();
    known.entry = held;
  }
  return known.entry_number;
}

py::object call(py::handle func, py::handle args, py::handle kwargs) {
  return checked(PyObject_Call(func.ptr(), args.ptr(), kwargs.is_none() ? nullptr : kwargs.ptr()));
}

// Returns all that the check of a call reads; nullopt if that is not known.
std::optional<CheckedCall> key_of(py::handle mode, py::handle func, py::handle args, py::handle kwargs) {
  CheckedCall key;
  key.add(number_of_mesh());
  key.add(at::GradMode::is_enabled());
  key.add_object(attribute<"_strict">(mode).ptr());
  key.add_object(attribute<"_local">(mode).ptr());
  key.add_object(func.ptr());
  return key.add(args.ptr()) && key.add(kwargs.ptr()) ? std::optional(std::move(key)) : std::nullopt;
}

}  // namespace

void set_type_checker(TypeChecker checker) {
  auto& known = memory();
  known.kinds.clear();
  known.calls.clear();
  known.entry = {};
  known.checker = std::move(checker);
}

bool is_idle_type_checker(PyObject* mode) {
  const auto& checker = memory().checker.mode;
  return checker && checker.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(mode)) &&
         attribute<"_disabled">(mode).ptr() == Py_True;
}

py::object check_types(py::handle mode, py::handle func, py::handle types, py::handle args,
                       py::handle kwargs) {
  if (attribute<"_disabled">(mode).ptr() == Py_True) {
    return call(func, args, kwargs);
  }
  const auto own = memory().checker.check;  // held: another thread may uninstall funcol meanwhile
  const auto recheck = memory().checker.recheck;
  const auto kind = kind_of(func.ptr());
  if (kind == CallKind::kUnchecked) {
    return call(func, args, kwargs);
  }
  auto key = kind == CallKind::kCached ? key_of(mode, func, args, kwargs) : std::nullopt;
  if (!key) {
    return own(mode, func, types, args, kwargs);
  }
  const auto* const found = memory().calls.find(*key);
  if (found == nullptr) {
    auto result = own(mode, func, types, args, kwargs);
    if (auto outcome = outcome_of(result.ptr(), *key)) {
      key->forget_tensors();
      memory().calls.insert_if_admitted(*std::move(key), std::move(outcome));
    }
    return result;
  }
  const auto outcome = *found;
  auto result = call(func, args, kwargs);
  return apply(*outcome, result.ptr(), *key) ? result : recheck(mode, func, types, args, kwargs, result);
}

py::object assert_type(py::handle own, py::handle tensor, py::handle types, py::handle options) {
  if (!THPVariable_CheckExact(tensor.ptr())) {
    return {};
  }
  CheckedCall key;
  key.add(number_of_mesh());
  key.add_object(own.ptr());
  key.add(static_cast<uint64_t>(THPVariable_Unpack(tensor.ptr()).dim()));
  if (!key.add_types(tensor.ptr()) || !key.add(types.ptr()) || !key.add(options.ptr())) {
    return {};
  }
  const auto dict = dict_of(tensor.ptr());
  if (const auto* const found = memory().calls.find(key)) {
    const auto leaf = (*found)->leaves.front();
    // The package updates an existing dict in place.
    if (auto* const type = type_in(dict); type == nullptr) {
      set_in(dict, interned<"_local_type">(), checked(PyDict_Copy(leaf.type.ptr())).ptr());
    } else if (PyDict_Update(type, leaf.type.ptr()) != 0) {
      throw py::error_already_set();
    }
    if (leaf.spec) {
      set_in(dict, interned<"_partition_spec">(), leaf.spec.ptr());
    }
    return py::reinterpret_borrow<py::object>(tensor);
  }
  auto result =
      own(tensor, *py::reinterpret_borrow<py::args>(types), **py::reinterpret_borrow<py::kwargs>(options));
  if (result.is(tensor)) {
    if (auto outcome = outcome_of(tensor.ptr(), key); outcome->leaves.front().type) {
      memory().calls.insert_if_admitted(std::move(key), std::move(outcome));
    }
  }
  return result;
}

size_t num_checked_types() { return memory().calls.size(); }

}  // namespace funcol::python
