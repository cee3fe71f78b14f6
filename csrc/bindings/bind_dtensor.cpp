// DTensor's methods for Python: a call each, and NotImplemented for what PyTorch's own function has to do.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "async/layers.h"
#include "bindings/bindings.h"
#include "bindings/dtensor_calls.h"
#include "bindings/dtensor_objects.h"
#include "bindings/fast_functions.h"

namespace funcol::python {
namespace {

PyObject* or_not_implemented(py::object result) {
  return result ? result.release().ptr() : not_implemented();
}

// (dtensor, grad_placements)
PyObject* dtensor_to_local(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "to_local");
  return or_not_implemented(to_local(args[0], args[1]));
  END_HANDLE_TH_ERRORS
}

// (local, mesh, placements, shape, stride, grad_placements)
PyObject* dtensor_from_local(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 6, "from_local");
  return or_not_implemented(from_local(args[0], args[1], args[2], args[3], args[4], args[5]));
  END_HANDLE_TH_ERRORS
}

// (dtensor, placements, async_op)
PyObject* redistribute_dtensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 3, "redistribute");
  return or_not_implemented(redistribute(args[0], args[1], args[2] == Py_True));
  END_HANDLE_TH_ERRORS
}

// (dtensor, grad_placements)
PyObject* dtensor_full_tensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "full_tensor");
  return or_not_implemented(full_tensor(args[0], args[1]));
  END_HANDLE_TH_ERRORS
}

PyTypeObject* spec_type() {
  static auto* const type = py::module::import("torch.distributed.tensor._dtensor_spec")
                                .attr("DTensorSpec")
                                .cast<py::object>()
                                .release()
                                .ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

// The DTensors of an operator's local results, one by one or in a list or tuple; a null object if there is
// something else among them.
py::object wrapped(py::handle local, py::handle spec) {
  if (THPVariable_Check(local.ptr())) {
    if (Py_TYPE(spec.ptr()) != spec_type()) {
      return {};
    }
    return make_dtensor(local.ptr(), spec, THPVariable_Unpack(local.ptr()).requires_grad());
  }
  const bool is_list = PyList_CheckExact(local.ptr());
  const bool has_specs = PyTuple_CheckExact(spec.ptr()) || PyList_CheckExact(spec.ptr());
  if (!has_specs || (!is_list && !PyTuple_CheckExact(local.ptr())) ||
      PySequence_Fast_GET_SIZE(local.ptr()) != PySequence_Fast_GET_SIZE(spec.ptr())) {
    return {};
  }
  const auto count = PySequence_Fast_GET_SIZE(local.ptr());
  auto results = py::reinterpret_steal<py::object>(is_list ? PyList_New(count) : PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::handle of_result = PySequence_Fast_GET_ITEM(local.ptr(), i);
    auto result =
        of_result.is_none() ? py::none() : wrapped(of_result, PySequence_Fast_GET_ITEM(spec.ptr(), i));
    if (!result) {
      return {};
    }
    is_list ? PyList_SET_ITEM(results.ptr(), i, result.release().ptr())
            : PyTuple_SET_ITEM(results.ptr(), i, result.release().ptr());
  }
  return results;
}

// (local results, specs)
PyObject* wrap_dtensors(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "wrap");
  return has_active_layers() ? not_implemented() : or_not_implemented(wrapped(args[0], args[1]));
  END_HANDLE_TH_ERRORS
}

PyObject* is_watched(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyBool_FromLong(has_active_layers() ? 1 : 0);
}

}  // namespace

void bind_dtensor(PyObject* module) {
  static PyMethodDef functions[] = {fast<dtensor_to_local>("dtensor_to_local"),
                                    fast<dtensor_from_local>("dtensor_from_local"),
                                    fast<redistribute_dtensor>("redistribute_dtensor"),
                                    fast<dtensor_full_tensor>("dtensor_full_tensor"),
                                    fast<wrap_dtensors>("wrap_dtensors"),
                                    {"is_watched", is_watched, METH_NOARGS, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module, functions) != 0) {
    throw python_error();
  }
}

}  // namespace funcol::python
