// FSDP2's Python objects, read and written by C++: parameters and their groups.
//
// C++ does FSDP2's work on every parameter of a group in one call. PyTorch's own function does it while a
// mode or transform of PyTorch is active, after a program has replaced a function that C++ bypasses, and for
// parameters of uncommon kinds. Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "pyobjects/attributes.h"

namespace funcol::python {

// The functions of FSDP2 that C++ replaces, by their names in Python's table,
// python/funcol/installation/fully_shard_table.py.
inline constexpr std::array kReplacedNames = {
    "FSDPParamGroup.pre_forward",
    "FSDPParamGroup.post_forward",
    "FSDPParamGroup.pre_backward",
    "FSDPParamGroup.post_backward",
    "FSDPParamGroup.unshard",
    "FSDPParamGroup.wait_for_unshard",
    "foreach_all_gather",
    "_default_all_gather_output_fn",
    "FSDPParamGroup._to_sharded",
    "FSDPParamGroup._to_unsharded",
    "FSDPParamGroup._take_unsharded_grads_to_reduce",
    "_default_reduce_scatter_input_fn",
    "_cast_and_view_sharded_grads",
    "FSDPParam.to_sharded_dtensor",
};

using ReplacedFunction = NameIn<kReplacedNames>;  // unmodified_group(object, "FSDPParamGroup.unshard")

// FSDP2 as funcol found it. The references are never released.
struct FullyShard {
  // A value that C++ relies on, and its place.
  struct Member {
    PyObject* owner;  // a class, or the __dict__ of a module
    PyObject* name;
    PyObject* value;

    bool is_unchanged() const;
  };

  // Values that are rarely replaced: after a change of one of their owners, all are looked up once.
  class Members {
   public:
    Members() = default;
    explicit Members(std::vector<Member> members);
    bool are_unchanged();

   private:
    struct Owner {
      PyObject* object;
      uint64_t version = 0;  // at the last lookup of its values; 0: look them up each time
    };

    std::vector<Member> members_;
    std::vector<Owner> owners_;
    bool all_are_ = true;
  };

  using Names = std::vector<PyObject*>;  // interned
  // The methods that the replacement of a function bypasses.
  struct Methods {
    Names of_group;
    Names of_param;
  };

  PyTypeObject* param = nullptr;
  PyTypeObject* group = nullptr;
  py::handle sharded;
  py::handle sharded_post_forward;
  py::handle unsharded;
  PyObject* alloc_storage = nullptr;
  PyObject* free_storage = nullptr;
  PyObject* module_setattr = nullptr;  // torch.nn.Module.__setattr__
  Members bypassed;
  Members collectives;  // between a group's gather or reduction and its process group
  Members streams;      // substitutes for streams and events on the CPU, which has none
  std::array<Methods, kReplacedNames.size()> methods;
};

FullyShard& fully_shard();

// Returns the methods that the replacement of `function` bypasses.
inline const FullyShard::Methods& bypassed_methods(ReplacedFunction function) {
  return fully_shard().methods.at(function.index);
}

// Returns true if no mode or transform is active, and no program has replaced a function that C++ bypasses.
bool fast_path_is_enabled();

// The __dict__ of one of FSDP2's objects. It has all attributes: FSDP2's classes have no setters.
class Fields {
 public:
  explicit Fields(PyObject* object)
      : object_(object), dict_(checked(PyObject_GenericGetDict(object, nullptr))) {}

  py::handle object() const { return object_; }

  // Returns the attribute, which is valid until it is set again, or null if there is none.
  template <AttributeName name>
  py::handle find() const {
    return find(interned<name>());
  }
  py::handle find(PyObject* name) const { return PyDict_GetItemWithError(dict_.ptr(), name); }

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

// Returns the fields of an object of FSDP2's class `type` itself that has none of `methods` of its own, or
// nullopt for other objects.
std::optional<Fields> find_unmodified(PyObject* object, const PyTypeObject* type,
                                      const FullyShard::Names& methods);

using Params = std::vector<Fields>;

// Returns the fields of each FSDPParam of a list, unchecked.
Params param_fields(py::handle list);

// Returns the FSDPParams in a list, or nullopt unless find_unmodified() finds all for `function`.
std::optional<Params> unmodified_params(PyObject* list, ReplacedFunction function);

struct Group {
  Fields fields;
  Params params;
};

// Returns an FSDPParamGroup, or nullopt unless find_unmodified() finds it for `function`. unmodified_group()
// also checks its parameters.
std::optional<Fields> unmodified_group_fields(PyObject* object, ReplacedFunction function);
std::optional<Group> unmodified_group(PyObject* object, ReplacedFunction function);

// Return the same while fast_path_is_enabled(), otherwise nullopt.
std::optional<Params> fast_path_params(py::handle list, ReplacedFunction function);
std::optional<Group> fast_path_group(py::handle object, ReplacedFunction function);

int64_t to_int(PyObject* object);
std::vector<int64_t> to_ints(PyObject* sequence);

bool is_cut_along_dim_0(const Fields& param);

// Returns the local tensor of the sharded parameter.
py::object local_tensor_of(const Fields& param);

// Returns true if the tensor class of a parameter has an extension of the gather: fsdp_pre_all_gather or
// fsdp_post_all_gather.
bool has_extension(const Params& params);

// Returns true if the parameters free only their gathered tensors when they are sharded again. With
// extensions of the gather they also free other tensors.
bool free_gathered_only(const Params& params);

// Returns the tensor of a Python object if it is plain and contiguous and has data, else null.
const at::Tensor* dense_tensor(py::handle object);

// Returns true if copies into `buffer` are fastest on one thread. ATen's copies use several threads for
// larger buffers.
bool is_small_on_cpu(const at::Tensor& buffer);
std::byte* bytes_of(const at::Tensor& tensor);

}  // namespace funcol::python
