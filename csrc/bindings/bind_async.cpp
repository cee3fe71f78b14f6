// Pending tensors for Python, the hooks with which C++ releases the GIL, and replacements of tensor methods
// with raw access to tensors.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <string>
#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "async/comm_tensor.h"
#include "async/dispatch_modes.h"
#include "async/in_flight.h"
#include "async/pending_collective.h"
#include "async/wake_key.h"
#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "comm/capture_safe_query.h"
#include "comm/gil_release.h"
#include "comm/orphaned_works.h"
#include "ops/backend_tensor.h"
#include "ops/collectives.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

void without_gil(void (*blocking)(void*), void* context) {
  const WithoutGil no_gil;
  blocking(context);
}

bool is_capturing_a_cuda_graph() {
  const py::gil_scoped_acquire gil;
  try {
    return imported<"torch.cuda", "is_current_stream_capturing">()().cast<bool>();
  } catch (const py::error_already_set&) {  // not a reason for a collective to fail
    return false;
  }
}

PyObject* py_is_pending(PyObject*, PyObject* object) {
  return PyBool_FromLong(THPVariable_Check(object) && is_pending(THPVariable_Unpack(object)));
}

// Returns True if `object` is the result of a collective, finished or not, or a view made while it was
// pending.
PyObject* py_was_pending(PyObject*, PyObject* object) {
  return PyBool_FromLong(THPVariable_Check(object) &&
                         AsyncTensorImpl::of(THPVariable_Unpack(object)) != nullptr);
}

// Implements wait_tensor(t) -> t. Returns NotImplemented if the call has to go through the dispatcher.
PyObject* py_wait_tensor(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const auto tensor = tensor_argument(object, "wait_tensor");
  if (!tensor.defined()) {
    check_no_tangents(&object, 1, "wait_tensor");
    Py_RETURN_NOTIMPLEMENTED;
  }
  {
    const WithoutGil no_gil;
    wait_tensor(tensor);
  }
  return Py_NewRef(object);
  END_HANDLE_TH_ERRORS
}

void settle_if_tensor(PyObject* object) {
  if (object != nullptr && THPVariable_Check(object)) {
    settle(THPVariable_Unpack(object));
  }
}

void correct_key_if_tensor(PyObject* object) {
  if (THPVariable_Check(object)) {
    correct_wake_key(*THPVariable_Unpack(object).unsafeGetTensorImpl());
  }
}

// Implements settle(t): waits if t is pending, and makes sure that t has no wake key unless it is a
// CommTensor.
PyObject* py_settle(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  settle_if_tensor(object);
  correct_key_if_tensor(object);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Sets whether the wake key is excluded on the current thread. Returns whether it was before.
PyObject* py_exclude_wake_key(PyObject*, PyObject* exclude) {
  const bool before = c10::impl::tls_is_dispatch_key_excluded(kWakeKey);
  c10::impl::tls_set_dispatch_key_excluded(kWakeKey, exclude == Py_True);
  return PyBool_FromLong(before ? 1 : 0);
}

at::Tensor make_comm_tensor(const at::Tensor& tensor) {
  const WithoutGil no_gil;
  return comm_tensor(tensor);
}

// A Work written in Python, so that tests control when data arrives and how it fails.
class CallbackWork final : public c10d::Work {
 public:
  CallbackWork(py::function on_wait, bool is_completed)
      : on_wait_(std::move(on_wait)), is_completed_(is_completed) {}
  ~CallbackWork() override {
    const py::gil_scoped_acquire gil;
    on_wait_ = py::function();
  }
  CallbackWork(const CallbackWork&) = delete;
  CallbackWork& operator=(const CallbackWork&) = delete;

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    const py::gil_scoped_acquire gil;
    on_wait_();
    return true;
  }
  bool isCompleted() override { return is_completed_.exchange(true); }

 private:
  py::function on_wait_;
  std::atomic<bool> is_completed_;  // what isCompleted() returns next; later true
};

StartedCollective callback_collective(const std::string& op, std::string group, py::function on_wait,
                                      bool is_completed) {
  StartedCollective start;
  start.op = funcol::interned(op);
  start.group = GroupRef(std::move(group));
  start.work = c10::make_intrusive<CallbackWork>(std::move(on_wait), is_completed);
  return start;
}

std::vector<at::Tensor> make_pending(const std::vector<at::Tensor>& outputs, py::function on_wait,
                                     const std::string& op, std::string group, bool is_completed) {
  auto start = callback_collective(op, std::move(group), std::move(on_wait), is_completed);
  {
    const BelowAutograd below_autograd;
    start.outputs.reserve(outputs.size());
    for (const auto& output : outputs) {
      start.outputs.push_back(output.detach());
    }
  }
  const WithoutGil no_gil;
  return as_pending(std::move(start));
}

// Makes the CommTensors `written` pending, as if a collective had been started on them.
void make_pending_in_place(const std::vector<at::Tensor>& written, py::function on_wait,
                           const std::string& op, std::string group) {
  auto start = callback_collective(op, std::move(group), std::move(on_wait), /*is_completed=*/true);
  for (const auto& tensor : written) {
    start.outputs.push_back(AsyncTensorImpl::of(tensor)->plain_alias());
  }
  const WithoutGil no_gil;
  wait_in_place(written, std::move(start));
}

// A Work that waits on PyTorch's own registry, for tensors of _c10d_functional ops.
class RegistryWork final : public c10d::Work {
 public:
  explicit RegistryWork(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    wait_on_registry(tensor_);
    return true;
  }
  bool isCompleted() override { return false; }  // the registry cannot be queried: wait() may block

 private:
  at::Tensor tensor_;
};

at::Tensor pending_on_registry(const at::Tensor& tensor) {
  StartedCollective start;
  start.op = "wait_tensor";
  start.group = GroupRef("of the tensor");
  start.is_counted = false;
  start.is_kept_by_registry = true;
  start.work = c10::make_intrusive<RegistryWork>(tensor);
  start.outputs = {tensor.alias()};
  return as_sole_pending(std::move(start));
}

// Implements pend(t): returns a tensor that waits by itself, for the result t of a _c10d_functional op.
// Returns NotImplemented if a layer has to see the wait.
PyObject* py_pend(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const auto* tensor = has_watching_layers() ? nullptr : plain_tensor(object);
  // Gloo bumps versions of gathered tensors when they arrive: views with a history would be stale.
  if (tensor == nullptr || tensor->is_meta() || tensor->requires_grad()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  return THPVariable_Wrap(is_pending(*tensor) ? *tensor : pending_on_registry(*tensor));
  END_HANDLE_TH_ERRORS
}

// Methods of torch.Tensor that would read a pending tensor without waking it, since they call no operator:
//  - new() and new_tensor() take the backend from the highest dispatch key;
//  - `x.data = pending` copies the storage pointer.
// Their C functions are replaced inside CPython's descriptors, so that the methods stay the same objects:
// each settles first, then calls the original. A CommTensor always has the wake key, which is removed
// meanwhile.

using KeywordFunction = PyObject* (*)(PyObject*, PyObject*, PyObject*);

KeywordFunction original_new = nullptr;
KeywordFunction original_new_tensor = nullptr;
setter original_set_data = nullptr;

template <KeywordFunction* original>
PyObject* settled_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  settle_if_tensor(self);
  if (THPVariable_Check(self)) {
    remove_wake_key(*THPVariable_Unpack(self).unsafeGetTensorImpl());
  }
  PyObject* made = (*original)(self, args, kwargs);
  correct_key_if_tensor(self);
  return made;
  END_HANDLE_TH_ERRORS
}

int settled_set_data(PyObject* self, PyObject* data, void* closure) {
  HANDLE_TH_ERRORS
  settle_if_tensor(data);
  settle_if_tensor(self);
  const int failed = original_set_data(self, data, closure);
  correct_key_if_tensor(self);
  return failed;
  END_HANDLE_TH_ERRORS_RET(-1)
}

py::object descriptor(const char* name) {
  const auto base = py::module::import("torch._C").attr("TensorBase");
  return base.attr("__dict__")[name];
}

template <KeywordFunction* original>
void wrap_method(const char* name) {
  const auto object = descriptor(name);
  TORCH_CHECK(Py_IS_TYPE(object.ptr(), &PyMethodDescr_Type), "funcol: torch.Tensor.", name,
              " is not a method descriptor in this PyTorch.");
  auto* method = reinterpret_cast<PyMethodDescrObject*>(object.ptr())->d_method;  // NOLINT
  TORCH_CHECK((method->ml_flags & METH_KEYWORDS) != 0, "funcol: torch.Tensor.", name,
              " takes no keywords in this PyTorch.");
  *original = reinterpret_cast<KeywordFunction>(reinterpret_cast<void (*)()>(method->ml_meth));  // NOLINT
  method->ml_meth =
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(settled_call<original>));  // NOLINT
}

void replace_methods() {
  wrap_method<&original_new>("new");
  wrap_method<&original_new_tensor>("new_tensor");
  const auto data = descriptor("data");
  TORCH_CHECK(Py_IS_TYPE(data.ptr(), &PyGetSetDescr_Type),
              "funcol: torch.Tensor.data is not a property in this PyTorch.");
  auto* property = reinterpret_cast<PyGetSetDescrObject*>(data.ptr())->d_getset;  // NOLINT
  original_set_data = property->set;
  property->set = settled_set_data;
}

}  // namespace

void bind_async(py::module m) {
  replace_methods();
  set_run_blocking(without_gil);
  set_is_capturing(is_capturing_a_cuda_graph);
  static PyMethodDef functions[] = {
      {"is_pending", py_is_pending, METH_O, nullptr},
      {"was_pending", py_was_pending, METH_O, nullptr},
      {"wait_tensor", py_wait_tensor, METH_O, nullptr},
      {"pend", py_pend, METH_O, nullptr},
      {"settle", py_settle, METH_O, nullptr},
      {"exclude_wake_key", py_exclude_wake_key, METH_O, nullptr},
      {},
  };
  add_functions(m, functions);
  const auto at_exit = py::module_::import("atexit").attr("register");
  at_exit(py::cpp_function(note_exiting_thread));
  at_exit(py::cpp_function(stop_release_thread, py::call_guard<py::gil_scoped_release>()));
  m.def("pending_on_registry", torch::wrap_pybind_function(pending_on_registry));
  m.def("make_pending", torch::wrap_pybind_function(make_pending), py::arg("outputs"), py::arg("on_wait"),
        py::arg("op") = "test", py::arg("group") = "test", py::arg("is_completed") = true);
  m.def("comm_tensor", torch::wrap_pybind_function(make_comm_tensor));
  m.def("make_pending_in_place", torch::wrap_pybind_function(make_pending_in_place), py::arg("written"),
        py::arg("on_wait"), py::arg("op") = "test", py::arg("group") = "test");
  m.def("has_wake_key", has_wake_key);
  m.def("wake_key_name", [] { return std::string(c10::toString(kWakeKey)); });
  m.def("num_orphans", [] {
    const WithoutGil no_gil;
    return sweep_orphans();
  });
  m.def("unwaited_collectives", unwaited_collectives);
  m.def(
      "wait_for_unwaited",
      [](double patience) {
        wait_for_unwaited(std::chrono::milliseconds(static_cast<int64_t>(patience * 1000)));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("async_counters", [] {
    const auto counters = async_counters();
    return std::make_pair(counters.waits, counters.views);
  });
}

}  // namespace funcol::python
