// FSDP2's objects, taken apart: parameters and their groups.
//
// This room does for a whole group, in one call, what FSDP2 does for each parameter. Left to PyTorch's own
// function is what runs while a mode or transform of PyTorch is active, after a method of FSDP2's classes has
// been replaced, or for a parameter of an uncommon kind. Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "pyobjects/attributes.h"

namespace funcol::python {

// FSDP2 as it was when funcol came; references that are never let go.
struct FullyShard {
  struct Member {
    PyObject* owner;  // a class, or the __dict__ of a module
    PyObject* name;
    PyObject* value;

    bool is_there() const;
  };
  using Members = std::vector<Member>;

  PyTypeObject* param = nullptr;
  PyTypeObject* group = nullptr;
  py::handle sharded;
  py::handle sharded_post_forward;
  py::handle unsharded;
  PyObject* alloc_storage = nullptr;
  PyObject* free_storage = nullptr;
  PyObject* set_attribute = nullptr;  // torch.nn.Module's
  Members passed_by;
  Members collectives;  // what is between a group's gather or reduction and its process group
  Members streams;      // the CPU's, which are none
};

FullyShard& fully_shard();

inline py::object checked(PyObject* result) {
  if (result == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

template <AttributeName name>
void set_attribute(PyObject* object, PyObject* value) {
  if (PyObject_SetAttr(object, interned<name>(), value) != 0) {
    throw py::error_already_set();
  }
}

bool are_there(const FullyShard::Members& members);

// Nobody watches, and nobody has replaced a function that is passed by here.
bool can_serve();

// What one of FSDP2's objects has in its __dict__, which is all that it has: its classes have no setters.
class Fields {
 public:
  explicit Fields(PyObject* object)
      : object_(object), dict_(checked(PyObject_GenericGetDict(object, nullptr))) {}

  PyObject* object() const { return object_; }

  // Null if there is none. Good until somebody sets it.
  template <AttributeName name>
  py::handle find() const {
    return PyDict_GetItemWithError(dict_.ptr(), interned<name>());
  }

  // Raises AttributeError if there is none.
  template <AttributeName name>
  py::object get() const {
    const auto value = find<name>();
    return value ? py::reinterpret_borrow<py::object>(value) : attribute<name>(object_);
  }

  template <AttributeName name>
  bool is(PyObject* value) const {
    return find<name>().ptr() == value;
  }

  template <AttributeName name>
  bool is_true() const {
    const auto truth = PyObject_IsTrue(get<name>().ptr());
    if (truth < 0) {
      throw py::error_already_set();
    }
    return truth == 1;
  }

  template <AttributeName name>
  void set(PyObject* value) const {
    if (PyDict_SetItem(dict_.ptr(), interned<name>(), value) != 0) {
      throw py::error_already_set();
    }
  }

 private:
  PyObject* object_;
  py::object dict_;
};

// An object of FSDP2's own class that has none of these methods of its own.
template <AttributeName... methods>
std::optional<Fields> usual(PyObject* object, const PyTypeObject* type) {
  if (Py_TYPE(object) != type) {
    return std::nullopt;
  }
  Fields fields(object);
  const bool has_own = (static_cast<bool>(fields.find<methods>()) || ...);
  return has_own ? std::nullopt : std::optional(std::move(fields));
}

using Params = std::vector<Fields>;

// A list of parameters, all of them usual.
template <AttributeName... methods>
std::optional<Params> usual_params(PyObject* list) {
  if (list == nullptr || !PyList_CheckExact(list)) {
    return std::nullopt;
  }
  Params params;
  params.reserve(PyList_GET_SIZE(list));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    auto param = usual<methods...>(PyList_GET_ITEM(list, i), fully_shard().param);
    if (!param) {
      return std::nullopt;
    }
    params.push_back(*std::move(param));
  }
  return params;
}

struct Group {
  Fields fields;
  Params params;
};

// Nothing if the group or one of its parameters is not usual.
template <AttributeName... methods>
std::optional<Group> usual_group(PyObject* object) {
  auto fields = usual<methods...>(object, fully_shard().group);
  auto params =
      fields ? usual_params<methods...>(fields->template find<"fsdp_params">().ptr()) : std::nullopt;
  return params ? std::optional(Group{*std::move(fields), *std::move(params)}) : std::nullopt;
}

int64_t to_int(PyObject* object);
std::vector<int64_t> to_ints(PyObject* sequence);

bool is_cut_along_dim_0(const Fields& param);

// Whether a tensor class of the program has a part in the gather of one of these: fsdp_pre_all_gather and
// fsdp_post_all_gather.
bool has_extension(const Params& params);

// Whether the gathered tensors are all memory that these let go of when they are sharded again. Extensions
// give others, in a sequence of their own choice.
bool free_gathered_only(const Params& params);

// Memory that one thread copies into fastest; for more, ATen's copies take several.
bool is_small_on_cpu(const at::Tensor& buffer);
std::byte* bytes_of(const at::Tensor& tensor);

}  // namespace funcol::python
