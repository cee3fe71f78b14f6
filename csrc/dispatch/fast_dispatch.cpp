#include "dispatch/fast_dispatch.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "async/dispatch_modes.h"
#include "compat/interpreter.h"
#include "dispatch/call_key.h"
#include "dispatch/call_plan.h"
#include "dispatch/composites.h"
#include "dispatch/mixed_tensors.h"
#include "dispatch/trace.h"
#include "layout/cache.h"
#include "layout/hash.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"

namespace funcol::python {
namespace {

constexpr std::array<const char*, static_cast<size_t>(FastPathStatus::kNumStatuses)> kStatusNames = {
    "served", "watched",  "handler",     "kind",  "argument",    "spec",
    "full",   "decision", "local shape", "write", "ended group",
};

py::dict fields_of(py::handle object) {
  return py::reinterpret_steal<py::dict>(attribute<"__dict__">(object).release());
}

// Returns a number that changes with the dict; a hash of its entries if Python does not count changes.
uint64_t version_of_handlers(PyObject* handlers) {
  if (const auto version = version_of(handlers); version != 0) {
    return version;
  }
  Hash hash;
  Py_ssize_t place = 0;
  PyObject* op = nullptr;
  PyObject* handler = nullptr;
  while (PyDict_Next(handlers, &place, &op, &handler) != 0) {
    hash.add(reinterpret_cast<uintptr_t>(op));
    hash.add(reinterpret_cast<uintptr_t>(handler));
  }
  return hash.value() | 1;
}

// The dispatcher as it was when native operators were installed.
class DispatcherSnapshot {
 public:
  explicit DispatcherSnapshot(NativeOperators parts)
      : parts_(std::move(parts)),
        fields_(fields_of(parts_.dispatcher)),
        fields_of_logger_(fields_of(parts_.logger)),
        num_fields_(fields_.size()) {}

  const NativeOperators& parts() const { return parts_; }

  // Returns true if the program has replaced none of the dispatcher's parts. Python counts the changes of a
  // class; the class's functions are checked once after each change.
  bool is_unmodified() {
    auto* const type = Py_TYPE(parts_.dispatcher.ptr());
    if (field<"sharding_propagator">() != parts_.propagator.ptr() || fields_.size() != num_fields_) {
      return false;
    }
    if (type->tp_version_tag != version_ || version_ == 0) {
      has_own_methods_ = parts_.is_unmodified().cast<bool>();
      version_ = type->tp_version_tag;
    }
    return has_own_methods_;
  }

  // Returns true if one of `ops` has a handler.
  bool has_handler(at::ArrayRef<DescribedPtr> ops) const {
    auto* const handlers = field<"_custom_op_handlers">();
    const auto version = version_of_handlers(handlers);
    return std::ranges::any_of(ops, [&](const DescribedPtr& op) {
      if (version != op->handlers_version) {
        auto* const handler = PyDict_GetItemWithError(handlers, op->overload.ptr());
        op->has_handler =
            PyErr_Occurred() != nullptr || (handler != nullptr && handler != parts_.default_handler.ptr());
        op->handlers_version = version;
        PyErr_Clear();
      }
      return op->has_handler;
    });
  }

  bool logs_decisions() const {
    auto* const handlers = PyDict_GetItemWithError(fields_of_logger_.ptr(), interned<"handlers">());
    return handlers == nullptr || PyList_GET_SIZE(handlers) != 0;
  }

 private:
  template <AttributeName name>
  PyObject* field() const {
    return PyDict_GetItemWithError(fields_.ptr(), interned<name>());
  }

  NativeOperators parts_;
  py::dict fields_;
  py::dict fields_of_logger_;
  size_t num_fields_;
  unsigned version_ = 0;  // of the dispatcher's class when has_own_methods_ was read
  bool has_own_methods_ = true;
};

const c10::OperatorHandle& detach_operator() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
  return op;
}

class FastPath {
 public:
  void install(NativeOperators parts) {
    forget_decisions();
    dispatcher_ = std::make_shared<DispatcherSnapshot>(std::move(parts));
  }

  void remove() {
    forget_decisions();
    const auto gone = std::exchange(dispatcher_, nullptr);
  }

  bool is_installed() const { return dispatcher_ != nullptr; }

  // Runs the call if the fast path handles it. Returns true if so: the stack then has its results.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    const auto dispatcher = dispatcher_;
    if (dispatcher == nullptr || !dispatcher->is_unmodified()) {
      return false;
    }
    const auto described = find(op, dispatcher->parts().dispatcher);
    const auto status = run(*dispatcher, described, stack);
    ++described->counts[static_cast<size_t>(status)];
    const bool is_handled = status == FastPathStatus::kHandled || status == FastPathStatus::kTableFull;
    if (auto* const trace = Recording::current(); trace != nullptr && !is_handled) {
      trace->fail(status == FastPathStatus::kCustomHandler ? described : nullptr);
    }
    return is_handled;
  }

  void forget_upstream_decisions() const {
    if (const auto dispatcher = dispatcher_) {
      dispatcher->parts().forget_upstream_decisions();
    }
  }

  DescribedPtr supported_operator(const c10::OperatorHandle& op) {
    const auto dispatcher = dispatcher_;
    if (dispatcher == nullptr || !dispatcher->is_unmodified() || dispatcher->logs_decisions()) {
      return nullptr;
    }
    auto described = find(op, dispatcher->parts().dispatcher);
    return dispatcher->has_handler(described) ? nullptr : described;
  }

  bool has_handler(at::ArrayRef<DescribedPtr> ops) const {
    const auto dispatcher = dispatcher_;
    return dispatcher != nullptr && dispatcher->has_handler(ops);
  }

  py::dict counts() const {
    py::dict counts;
    for (const auto& [schema, described] : operators_) {
      py::dict of_one;
      for (size_t status = 0; status < kStatusNames.size(); ++status) {
        if (described->counts[status] != 0) {
          of_one[kStatusNames[status]] = described->counts[status];
        }
      }
      if (!of_one.empty()) {
        counts[py::str(described->overload)] = of_one;
      }
    }
    return counts;
  }

  void forget_counts() {
    for (const auto& [schema, described] : operators_) {
      described->counts.fill(0);
    }
  }

  // Forgets all decisions. Keeps descriptions, since they have the counts; calls in flight own theirs.
  void forget_decisions() {
    for (const auto* const name : {"calls", "composites", "composite_gradients"}) {
      clear_table(find_table(name));
    }
    for (auto& [schema, described] : operators_) {
      described->is_current = false;
    }
  }

 private:
  // Runs the call. Returns kHandled, or kTableFull if the call is new and the table has no room for it, or
  // else why PyTorch has to run the call. A call without room is decided each time: PyTorch would remember it
  // forever, in an unbounded table.
  FastPathStatus run(const DispatcherSnapshot& dispatcher, const DescribedPtr& described,
                     torch::jit::Stack& stack) {
    if (described->result_kind == DescribedOperator::ResultKind::kUnsupported) {
      return FastPathStatus::kOperatorKind;
    }
    if (dispatcher.has_handler(described)) {
      return FastPathStatus::kCustomHandler;
    }
    if (described->writes && PySet_GET_SIZE(dispatcher.parts().copies.ptr()) != 0) {
      return FastPathStatus::kWrite;
    }
    if (dispatcher.logs_decisions()) {
      return FastPathStatus::kObserved;
    }
    Call call;
    if (const auto status = read_call(described, stack, call); status != FastPathStatus::kHandled) {
      return status;
    }
    auto* const trace = Recording::current();
    CallPlanPtr plan;
    bool is_full = false;
    if (const auto* const known = calls_.find(call.key)) {
      plan = *known;
    } else {
      is_full = trace == nullptr && !calls_.admits();
      plan = plan_call(dispatcher.parts(), call, stack);
      if (!is_full) {
        calls_.insert(call.key, plan);
      }
    }
    if (plan == nullptr) {
      return FastPathStatus::kDecision;
    }
    if (trace != nullptr) {
      trace->record_call(call, plan, stack);
    }
    const auto status = plan->run(call, dispatcher.parts().draw, stack);
    if (trace != nullptr && status == FastPathStatus::kHandled) {
      trace->record_results(stack);
    }
    return status == FastPathStatus::kHandled && is_full ? FastPathStatus::kTableFull : status;
  }

  // Decides a new call. Returns null if PyTorch has to run it, or to raise the decision's error: it then
  // queries the propagator again. If the operator has no result for these shapes, raises PyTorch's error
  // here.
  static CallPlanPtr plan_call(const NativeOperators& parts, const Call& call,
                               const torch::jit::Stack& stack) {
    std::optional<DecidedCall> decided;
    try {
      decided = decide_call(parts, call, stack);
      if (decided && !decided->error) {
        auto plan = CallPlan::make(call, stack, *decided);
        return plan ? std::make_shared<const CallPlan>(*std::move(plan)) : nullptr;
      }
    } catch (const py::error_already_set&) {
    } catch (const c10::Error&) {
    } catch (const python_error&) {
      PyErr_Clear();
    }
    // Autograd detaches without PyTorch's fallback, in which operators fail under fake modes.
    if (decided && decided->error && !(call.op->handle == detach_operator())) {
      PyErr_SetObject(PyExceptionInstance_Class(decided->error.ptr()), decided->error.ptr());
      throw py::error_already_set();
    }
    return nullptr;
  }

  DescribedPtr find(const c10::OperatorHandle& op, py::handle dispatcher) {
    // After a library is destroyed, another operator may get the schema's address.
    auto& described = operators_[&op.schema()];
    if (described == nullptr || !described->is_current || !(described->handle == op) ||
        !(described->name == op.operator_name()) ||
        described->is_factor.size() != op.schema().arguments().size()) {
      auto fresh = std::make_shared<DescribedOperator>(describe_operator(op, dispatcher));
      if (described != nullptr && described->name == fresh->name) {
        fresh->counts = described->counts;
      }
      operators_[&op.schema()] = fresh;
      return fresh;
    }
    return described;
  }

  std::shared_ptr<DispatcherSnapshot> dispatcher_;
  std::unordered_map<const c10::FunctionSchema*, DescribedPtr> operators_;
  Cache<CallKey, CallPlanPtr> calls_{find_table("calls")};  // null for a decision that PyTorch carries out
};

FastPath& fast_path() {
  static auto* const fast_path = new FastPath;  // NOLINT: outlives Python
  return *fast_path;
}

// Returns true for a DTensor that was made outside of inference mode.
bool is_normal_dtensor(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().key_set().has(c10::DispatchKey::Python) ||
      value.toTensor().is_inference()) {
    return false;
  }
  const py::gil_scoped_acquire gil;
  return dtensor_object(value.toTensor()) != nullptr;
}

// Returns true if a result of the operator is a view of a normal DTensor.
bool views_normal_dtensor(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = arguments[i].alias_info();
    if (alias != nullptr && !alias->isWrite() &&
        is_normal_dtensor(stack[stack.size() - arguments.size() + i])) {
      return true;
    }
  }
  return false;
}

// A scope outside of inference mode, for an operator whose result is a view of a normal tensor. Such views of
// plain tensors are normal tensors in inference mode, too, and autograd records their base.
class OutsideInferenceMode {
 private:
  c10::InferenceMode normal_{false};
  at::NoGradGuard without_gradients_;
  c10::impl::ExcludeDispatchKeyGuard as_in_fallback_{kBeforePython};
};

// Of this thread: the number of calls on the stack that PyTorch runs, and whether its table of decisions is
// to be emptied before the next one.
thread_local int num_upstream_calls = 0;
thread_local bool upstream_table_is_full = false;

// A call that PyTorch runs.
class UpstreamCall {
 public:
  UpstreamCall() {
    if (num_upstream_calls == 0 && std::exchange(upstream_table_is_full, false)) {
      const py::gil_scoped_acquire gil;
      fast_path().forget_upstream_decisions();
    }
    ++num_upstream_calls;
  }
  ~UpstreamCall() { --num_upstream_calls; }
  UpstreamCall(const UpstreamCall&) = delete;
  UpstreamCall& operator=(const UpstreamCall&) = delete;
};

class FastPathInterpreter final : public compat::ForwardingInterpreter {
 public:
  // Detaches what autograd saves for the backward pass. Autograd calls this without the dispatcher.
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* self) const override {
    if (!has_active_layers()) {
      const c10::impl::ExcludeDispatchKeyGuard guard(kBeforePython);
      torch::jit::Stack stack;
      stack.emplace_back(at::Tensor(at::TensorBase(
          c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::unsafe_reclaim_from_nonowning(
              const_cast<c10::TensorImpl*>(self)))));
      if (run_fast_path(detach_operator(), stack)) {
        return stack.back().toTensor().getIntrusivePtr();
      }
    }
    const UpstreamCall call;
    return base()->detach(self);
  }

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    if (has_active_layers()) {
      fall_back_to_pytorch(op, stack);
      return;
    }
    std::optional<OutsideInferenceMode> outside;
    if (c10::InferenceMode::is_enabled() && fast_path().is_installed() && views_normal_dtensor(op, *stack)) {
      outside.emplace();
    }
    if (!run_fast_path(op, *stack)) {
      fall_back_to_pytorch(op, stack);
    }
  }

 private:
  void fall_back_to_pytorch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    const UpstreamCall call;
    fast_path().is_installed() ? dispatch_naming_plain_tensors(*base(), op, stack)
                               : base()->dispatch(op, stack);
  }

  static bool run_fast_path(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    const py::gil_scoped_acquire gil;
    return fast_path().run(op, stack);
  }
};

// Returns the interpreter, which is never destroyed: threads may be running in it.
FastPathInterpreter& interpreter() {
  static auto* const interpreter = new FastPathInterpreter;  // NOLINT
  return *interpreter;
}

}  // namespace

void install_native_operators(NativeOperators parts) {
  fast_path().install(std::move(parts));
  auto& current = getPyInterpreter()->vtable_;
  if (current != &interpreter() && interpreter().base() == nullptr) {
    interpreter().set_base(current);
    current = &interpreter();
  } else if (current == interpreter().base()) {
    current = &interpreter();
  }
  install_composites();
}

// Leaves this table in place, without effect, if another one has been installed in front of it.
void remove_native_operators() {
  auto& current = getPyInterpreter()->vtable_;
  if (current == &interpreter()) {
    current = interpreter().base();
  }
  remove_composites();
  fast_path().remove();
}

DescribedPtr supported_operator(const c10::OperatorHandle& op) { return fast_path().supported_operator(op); }

bool has_handler(at::ArrayRef<DescribedPtr> ops) { return fast_path().has_handler(ops); }

bool has_native_operators() { return fast_path().is_installed(); }

py::dict operator_counts() { return fast_path().counts(); }

void forget_operator_counts() { fast_path().forget_counts(); }

void forget_call_plans() { fast_path().forget_decisions(); }

void forget_upstream_decisions_later() { upstream_table_is_full = true; }

}  // namespace funcol::python
