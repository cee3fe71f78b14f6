// csrc/fsdp for Python, see python/funcol/installation/fully_shard.py. Functions return NotImplemented if
// PyTorch's own function has to run.
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>

#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "fsdp/gather.h"
#include "fsdp/group_gradients.h"
#include "fsdp/groups.h"
#include "fsdp/param_group_view.h"
#include "pyobjects/attributes.h"

namespace funcol::python {
namespace {

// Returns the members of triples (module or class, name in it, value there).
FullyShard::Members members(PyObject* triples) {
  std::vector<FullyShard::Member> result;
  for (const auto triple : py::reinterpret_borrow<py::sequence>(triples)) {
    const auto member = py::reinterpret_borrow<py::sequence>(triple);
    const py::object owner = member[0];
    const auto holder = PyModule_Check(owner.ptr()) ? attribute<"__dict__">(owner) : owner;
    result.push_back({Py_NewRef(holder.ptr()), Py_NewRef(py::object(member[1]).ptr()),
                      Py_NewRef(py::object(member[2]).ptr())});
  }
  return FullyShard::Members(std::move(result));
}

FullyShard::Names interned_names(py::handle names) {
  FullyShard::Names result;
  for (const auto name : names) {
    auto* text = Py_NewRef(name.ptr());
    PyUnicode_InternInPlace(&text);
    result.push_back(text);
  }
  return result;
}

// Takes ((FSDPParamGroup, FSDPParam), (sharded, sharded post forward, unsharded), (alloc_storage,
// free_storage), nn.Module.__setattr__, values that C++ bypasses, values between a group and its process
// group, the CPU's stream functions, {function: (methods of the group, methods of a parameter) that C++
// bypasses}). The three lists of values are as members() takes them.
PyObject* register_fully_shard(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 8, "register_fully_shard");
  auto& known = fully_shard();
  const auto item = [](PyObject* tuple, Py_ssize_t i) {
    return checked(PySequence_GetItem(tuple, i)).release().ptr();
  };
  known.group = reinterpret_cast<PyTypeObject*>(item(args[0], 0));
  known.param = reinterpret_cast<PyTypeObject*>(item(args[0], 1));
  known.sharded = item(args[1], 0);
  known.sharded_post_forward = item(args[1], 1);
  known.unsharded = item(args[1], 2);
  known.alloc_storage = item(args[2], 0);
  known.free_storage = item(args[2], 1);
  known.module_setattr = Py_NewRef(args[3]);
  known.bypassed = members(args[4]);
  known.collectives = members(args[5]);
  known.streams = members(args[6]);
  const auto methods = py::reinterpret_borrow<py::dict>(args[7]);
  for (size_t i = 0; i < kReplacedNames.size(); ++i) {
    known.methods.at(i) = {};
    if (methods.contains(kReplacedNames.at(i))) {
      const py::tuple both = methods[kReplacedNames.at(i)];
      known.methods.at(i) = {interned_names(both[0]), interned_names(both[1])};
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Returns True if a profiler or a mode observes ranges of record_function.
PyObject* is_profiled(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyBool_FromLong(at::hasCallbacks() || is_observed() ? 1 : 0);
}

}  // namespace

void bind_fsdp(py::module m) {
  static PyMethodDef functions[] = {
      fast<register_fully_shard>("register_fully_shard"),
      {"is_profiled", is_profiled, METH_NOARGS, nullptr},
      forwarded<fsdp_shards, "fsdp_shards">(),
      forwarded<fsdp_copy_in, "fsdp_copy_in">(),
      forwarded<fsdp_copy_out, "fsdp_copy_out">(),
      forwarded<fsdp_to_sharded, "fsdp_to_sharded">(),
      forwarded<fsdp_to_unsharded, "fsdp_to_unsharded">(),
      forwarded<fsdp_take_gradients, "fsdp_take_gradients">(),
      forwarded<fsdp_padded_sizes, "fsdp_padded_sizes">(),
      forwarded<fsdp_gradient_type, "fsdp_gradient_type">(),
      forwarded<fsdp_reduce_copy_in, "fsdp_reduce_copy_in">(),
      forwarded<fsdp_accumulate, "fsdp_accumulate">(),
      forwarded<fsdp_sharded_dtensor, "fsdp_sharded_dtensor">(),
      forwarded<fsdp_pre_forward, "fsdp_pre_forward">(),
      forwarded<fsdp_post_forward, "fsdp_post_forward">(),
      forwarded<fsdp_pre_backward, "fsdp_pre_backward">(),
      forwarded<fsdp_unshard, "fsdp_unshard">(),
      forwarded<fsdp_wait_for_unshard, "fsdp_wait_for_unshard">(),
      forwarded<fsdp_post_backward, "fsdp_post_backward">(),
      {},
  };
  add_functions(m, functions);
}

}  // namespace funcol::python
