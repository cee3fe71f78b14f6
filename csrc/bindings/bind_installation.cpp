// C++ functions for funcol.install() and the legacy operators, and the facts that `python -m funcol info` and
// `python -m funcol run` print. They keep the GIL; see ops/core_kernels.h.
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "async/async_tensor.h"
#include "async/dispatch_modes.h"
#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "comm/backend_call.h"
#include "comm/process_group.h"
#include "kernels/cuda_library.h"
#include "ops/core_kernels.h"
#include "transfer/executor.h"

namespace funcol::python {
namespace {

void set_python_ranks_resolver(py::function resolver) {
  // Never freed: operators may still run after the interpreter has ended.
  auto* const kept = std::make_unique<py::function>(std::move(resolver)).release();
  set_ranks_resolver([kept](const std::vector<int64_t>& ranks, const std::string& tag) {
    const py::gil_scoped_acquire gil;
    return (*kept)(ranks, tag).cast<std::optional<std::string>>();
  });
}

PyObject* replacement_of_errors = nullptr;  // under the GIL

// Raises the Python error of a C++ error, replaced as replace_errors() says.
void raise_replaced(const c10::Error& error) {
  const auto raised = [&](auto* type) {
    PyErr_SetString(type, error.what_without_backtrace());
    replace_error();
    throw py::error_already_set();
  };
  const py::gil_scoped_acquire gil;
  if (dynamic_cast<const c10::ValueError*>(&error) != nullptr) {
    raised(PyExc_ValueError);
  }
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr) {
    raised(PyExc_IndexError);
  }
  if (dynamic_cast<const c10::TypeError*>(&error) != nullptr) {
    raised(PyExc_TypeError);
  }
}

// Replaces errors of all fast functions and of PyTorch's operators.
void replace_all_errors(const py::object& replacement) {
  replace_errors(replacement);
  set_error_translation(replacement.is_none() ? nullptr : raise_replaced);
}

// isinstance() with a class whose instances include pending tensors. A class's metaclass decides
// isinstance(): install_pending_instances() gives the class a metaclass that derives from its own and adds a
// check.

PyObject* class_of_pending = nullptr;  // kept by sys.modules; null while no class has the check

PyObject* instance_check_of_type() {
  return PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyType_Type), "__instancecheck__");
}

PyObject* is_instance(PyObject* cls, PyObject* instance) {
  HANDLE_TH_ERRORS
  if (cls == class_of_pending && THPVariable_Check(instance) && is_pending(THPVariable_Unpack(instance))) {
    Py_RETURN_TRUE;
  }
  const auto check = py::reinterpret_steal<py::object>(instance_check_of_type());
  return PyObject_CallFunctionObjArgs(check.ptr(), cls, instance, nullptr);
  END_HANDLE_TH_ERRORS
}

PyMethodDef is_instance_method = {"__instancecheck__", is_instance, METH_O, nullptr};

// Returns the check above for a class; for the metaclass, type's own check, so that Dynamo, which looks
// there, does not take the class for one with a check of its own.
PyObject* get_instance_check(PyObject* /*self*/, PyObject* cls, PyObject* /*owner*/) {
  return cls == nullptr || cls == Py_None ? instance_check_of_type()
                                          : PyCFunction_New(&is_instance_method, cls);
}

py::object instance_check() {
  static PyType_Slot slots[] = {{Py_tp_descr_get, reinterpret_cast<void*>(get_instance_check)}, {0, nullptr}};
  static PyType_Spec spec = {"funcol._C.InstanceCheck", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  return type ? type() : throw py::error_already_set();
}

void set_metaclass(PyObject* cls, PyTypeObject* metaclass) {
  auto* const before = Py_TYPE(cls);
  Py_INCREF(metaclass);
  Py_SET_TYPE(cls, metaclass);
  PyType_Modified(reinterpret_cast<PyTypeObject*>(cls));
  Py_DECREF(before);
}

void install_pending_instances(const py::type& cls) {
  if (class_of_pending != nullptr) {
    return;
  }
  const auto own = py::type::of(cls);
  py::dict members;
  members["__instancecheck__"] = instance_check();
  members["__module__"] = own.attr("__module__");
  members["__slots__"] = py::tuple();
  const auto derived = py::type::of(own)(own.attr("__name__"), py::make_tuple(own), members);
  auto* const metaclass = reinterpret_cast<PyTypeObject*>(derived.ptr());
  TORCH_CHECK(metaclass->tp_basicsize == Py_TYPE(cls.ptr())->tp_basicsize,
              "funcol: instances of the metaclass of ", py::repr(cls).cast<std::string>(),
              " are smaller than those of one that derives from it. Please report this.");
  set_metaclass(cls.ptr(), metaclass);
  class_of_pending = cls.ptr();
}

void remove_pending_instances() {
  if (class_of_pending != nullptr) {
    set_metaclass(class_of_pending, Py_TYPE(class_of_pending)->tp_base);
    class_of_pending = nullptr;
  }
}

// Returns, by dispatch key, the funcol ops that have a kernel of their own for it.
std::map<std::string, std::vector<std::string>> registered_kernels() {
  using Key = c10::DispatchKey;
  std::map<std::string, std::vector<std::string>> kernels;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("funcol::")) {
      continue;
    }
    const auto op = c10::Dispatcher::singleton().findOp(name);
    for (const auto key : {Key::CPU, Key::CUDA, Key::Meta, Key::Autograd, Key::CompositeExplicitAutograd}) {
      if (op && op->hasKernelForDispatchKey(key)) {
        kernels[c10::toString(key)].push_back(name.name);
      }
    }
  }
  return kernels;
}

}  // namespace

void replace_errors(py::handle function) {
  Py_XDECREF(replacement_of_errors);
  replacement_of_errors = function.is_none() ? nullptr : function.inc_ref().ptr();
}

void replace_error() {
  if (replacement_of_errors == nullptr) {
    return;
  }
  py::error_already_set error;  // takes the exception
  const auto other =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(replacement_of_errors, error.value().ptr()));
  if (!other) {
    PyErr_Clear();  // the error of the call counts
  }
  if (!other || other.is_none()) {
    error.restore();
    return;
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(other.ptr())), other.ptr());
}

void bind_installation(py::module m) {
  m.def("set_ranks_resolver", set_python_ranks_resolver);
  m.def("define_missing_legacy_ops", define_missing_legacy_ops);
  m.def("install_core_kernels", install_core_kernels);
  m.def("set_ops_are_replaced", set_ops_are_replaced);
  m.def("set_c10d_ops_are_replaced", set_c10d_ops_are_replaced);
  m.def("remove_core_kernels", remove_core_kernels);
  m.def("ops_with_core_kernels", ops_with_core_kernels);
  m.def("replace_errors", replace_all_errors);
  m.def("install_pending_instances", torch::wrap_pybind_function(install_pending_instances));
  m.def("remove_pending_instances", remove_pending_instances);
  m.def("registered_kernels", registered_kernels);
  m.def("redistribution_counts", [] {
    const auto counts = redistribution_counts();
    return py::make_tuple(counts.number, counts.bytes);
  });
  m.def("why_no_cuda_kernels", kernels::why_no_cuda_kernels);
}

}  // namespace funcol::python
