// What FSDP2 does for each parameter of a group, a call for the whole group: see
// python/funcol/fully_shard.py.
//
// NotImplemented is given before anything has happened, for what PyTorch's own function has to do: where a
// mode or transform of PyTorch is active, a method of FSDP2's classes has been replaced, a parameter is of an
// uncommon kind.
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>

#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "bindings/fully_shard_gather.h"
#include "bindings/fully_shard_gradients.h"
#include "bindings/fully_shard_objects.h"
#include "bindings/python_args.h"

namespace funcol::python {
namespace {

py::object kept(const py::object& object) {
  Py_INCREF(object.ptr());
  return object;
}

// Triples of what has a __dict__, a name in it, and the value there.
FullyShard::Members members(PyObject* triples) {
  const auto item = [](PyObject* tuple, Py_ssize_t i) { return checked(PySequence_GetItem(tuple, i)); };
  FullyShard::Members result;
  for (Py_ssize_t i = 0; i < PySequence_Size(triples); ++i) {
    const auto member = item(triples, i);
    const auto owner = item(member.ptr(), 0);
    const bool is_module = PyModule_Check(owner.ptr());
    result.push_back({kept(is_module ? attribute<"__dict__">(owner) : owner).ptr(),
                      kept(item(member.ptr(), 1)).ptr(), kept(item(member.ptr(), 2)).ptr()});
  }
  return result;
}

// (param class, group class, (sharded, sharded post forward, unsharded), (alloc_storage, free_storage),
// nn.Module.__setattr__, what is passed by, what is between a group and its collectives, the CPU's streams):
// the last three as members() takes them.
PyObject* know_fully_shard(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 8, "know_fully_shard");
  auto& known = fully_shard();
  const auto item = [](PyObject* tuple, Py_ssize_t i) {
    return kept(checked(PySequence_GetItem(tuple, i))).ptr();
  };
  known.param = reinterpret_cast<PyTypeObject*>(Py_NewRef(args[0]));
  known.group = reinterpret_cast<PyTypeObject*>(Py_NewRef(args[1]));
  known.sharded = item(args[2], 0);
  known.sharded_post_forward = item(args[2], 1);
  known.unsharded = item(args[2], 2);
  known.alloc_storage = item(args[3], 0);
  known.free_storage = item(args[3], 1);
  known.set_attribute = Py_NewRef(args[4]);
  known.passed_by = members(args[5]);
  known.collectives = members(args[6]);
  known.streams = members(args[7]);
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
                                    {"is_recorded", is_recorded, METH_NOARGS, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};
  for (auto* const some :
       {functions, gather_functions(), gradient_functions(), group_functions(), reduction_functions()}) {
    if (PyModule_AddFunctions(module, some) != 0) {
      throw python_error();
    }
  }
}

}  // namespace funcol::python
