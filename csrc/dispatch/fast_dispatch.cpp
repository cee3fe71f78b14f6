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

constexpr std::array<const char*, static_cast<size_t>(ServeStatus::kNumStatuses)> kServeStatuses = {
    "served", "watched", "handler", "kind", "argument", "spec", "full", "decision", "local shape", "write",
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
class Dispatcher {
 public:
  explicit Dispatcher(NativeOperators parts)
      : parts_(std::move(parts)),
        fields_(fields_of(parts_.dispatcher)),
        fields_of_logger_(fields_of(parts_.logger)),
        num_fields_(fields_.size()) {}

  const NativeOperators& parts() const { return parts_; }

  // Returns true if the program has replaced none of the dispatcher's parts. Python counts the changes of a
  // class; the class's functions are checked once after each change.
  bool is_own() {
    auto* const type = Py_TYPE(parts_.dispatcher.ptr());
    if (field<"sharding_propagator">() != parts_.propagator.ptr() || fields_.size() != num_fields_) {
      return false;
    }
    if (type->tp_version_tag != version_ || version_ == 0) {
      has_own_methods_ = parts_.is_own().cast<bool>();
      version_ = type->tp_version_tag;
    }
    return has_own_methods_;
  }

  bool has_handler(DescribedOperator& op) const {
    auto* const handlers = field<"_custom_op_handlers">();
    const auto version = version_of_handlers(handlers);
    if (version != op.handlers_version) {
      auto* const handler = PyDict_GetItemWithError(handlers, op.overload.ptr());
      op.has_handler =
          PyErr_Occurred() != nullptr || (handler != nullptr && handler != parts_.own_handler.ptr());
      op.handlers_version = version;
      PyErr_Clear();
    }
    return op.has_handler;
  }

  bool logs() const {
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

class Table {
 public:
  void put(NativeOperators parts) {
    forget();
    dispatcher_ = std::make_shared<Dispatcher>(std::move(parts));
  }

  void take() {
    forget();
    const auto gone = std::exchange(dispatcher_, nullptr);
  }

  bool is_put() const { return dispatcher_ != nullptr; }

  // Runs the call if the fast path handles it. Returns true if so: the stack then has its results.
  bool serve(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    const auto dispatcher = dispatcher_;
    if (dispatcher == nullptr || !dispatcher->is_own()) {
      return false;
    }
    const auto described = find(op, dispatcher->parts().dispatcher);
    const auto status = serve(*dispatcher, described, stack);
    ++described->counts[static_cast<size_t>(status)];
    const bool is_served = status == ServeStatus::kServed || status == ServeStatus::kFull;
    if (auto* const trace = Recording::current(); trace != nullptr && !is_served) {
      trace->fail();
    }
    return is_served;
  }

  std::shared_ptr<DescribedOperator> supported_operator(const c10::OperatorHandle& op) {
    const auto dispatcher = dispatcher_;
    if (dispatcher == nullptr || !dispatcher->is_own() || dispatcher->logs()) {
      return nullptr;
    }
    auto described = find(op, dispatcher->parts().dispatcher);
    return dispatcher->has_handler(*described) ? nullptr : described;
  }

  py::dict counts() const {
    py::dict counts;
    for (const auto& [schema, described] : operators_) {
      py::dict of_one;
      for (size_t status = 0; status < kServeStatuses.size(); ++status) {
        if (described->counts[status] != 0) {
          of_one[kServeStatuses[status]] = described->counts[status];
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
  void forget() {
    for (const auto* const name : {"calls", "composites", "composite_gradients"}) {
      clear_table(find_table(name));
    }
    for (auto& [schema, described] : operators_) {
      described->is_current = false;
    }
  }

 private:
  using DescribedPtr = std::shared_ptr<DescribedOperator>;

  // Runs the call. Returns kServed, or kFull if the call is new and the table has no room for it, or else why
  // PyTorch has to run the call. A call without room is decided each time: PyTorch would remember it forever,
  // in an unbounded table.
  ServeStatus serve(const Dispatcher& dispatcher, const DescribedPtr& described, torch::jit::Stack& stack) {
    if (described->results == DescribedOperator::Results::kNotServed) {
      return ServeStatus::kKind;
    }
    if (dispatcher.has_handler(*described)) {
      return ServeStatus::kHandler;
    }
    if (described->writes && PySet_GET_SIZE(dispatcher.parts().copies.ptr()) != 0) {
      return ServeStatus::kWrite;
    }
    if (dispatcher.logs()) {
      return ServeStatus::kWatched;
    }
    Call call;
    if (const auto status = read_call(described, stack, call); status != ServeStatus::kServed) {
      return status;
    }
    auto* const trace = Recording::current();
    CallPlanPtr served;
    bool is_full = false;
    if (const auto* const known = calls_.find(call.key)) {
      served = *known;
    } else {
      is_full = trace == nullptr && !calls_.admits();
      served = learn(dispatcher.parts(), call, stack);
      if (!is_full) {
        calls_.insert(call.key, served);
      }
    }
    if (served == nullptr) {
      return ServeStatus::kDecision;
    }
    if (trace != nullptr) {
      trace->before(call, served, stack);
    }
    const auto status = served->run(call, dispatcher.parts().draw, stack);
    if (trace != nullptr && status == ServeStatus::kServed) {
      trace->after(stack);
    }
    return status == ServeStatus::kServed && is_full ? ServeStatus::kFull : status;
  }

  // Decides a new call. Returns null if PyTorch has to run it, or to raise the decision's error: it then
  // queries the propagator again. If the operator has no result for these shapes, raises PyTorch's error
  // here.
  static CallPlanPtr learn(const NativeOperators& parts, const Call& call, const torch::jit::Stack& stack) {
    std::optional<DecidedCall> decided;
    try {
      decided = decide_call(parts, call, stack);
      if (decided && !decided->error) {
        auto served = CallPlan::make(call, stack, *decided);
        return served ? std::make_shared<const CallPlan>(*std::move(served)) : nullptr;
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

  std::shared_ptr<Dispatcher> dispatcher_;
  std::unordered_map<const c10::FunctionSchema*, DescribedPtr> operators_;
  Cache<CallKey, CallPlanPtr> calls_{find_table("calls")};  // null for a decision that PyTorch carries out
};

Table& table() {
  static auto* const table = new Table;  // NOLINT: outlives Python
  return *table;
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

class ServingInterpreter final : public compat::ForwardingInterpreter {
 public:
  // Detaches what autograd saves for the backward pass. Autograd calls this without the dispatcher.
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* self) const override {
    if (!has_active_layers()) {
      const c10::impl::ExcludeDispatchKeyGuard guard(kBeforePython);
      torch::jit::Stack stack;
      stack.emplace_back(at::Tensor(at::TensorBase(
          c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::unsafe_reclaim_from_nonowning(
              const_cast<c10::TensorImpl*>(self)))));
      if (serves(detach_operator(), stack)) {
        return stack.back().toTensor().getIntrusivePtr();
      }
    }
    return base()->detach(self);
  }

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    if (has_active_layers()) {
      leave_to_pytorch(op, stack);
      return;
    }
    std::optional<OutsideInferenceMode> outside;
    if (c10::InferenceMode::is_enabled() && table().is_put() && views_normal_dtensor(op, *stack)) {
      outside.emplace();
    }
    if (!serves(op, *stack)) {
      leave_to_pytorch(op, stack);
    }
  }

 private:
  void leave_to_pytorch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    table().is_put() ? dispatch_naming_plain_tensors(*base(), op, stack) : base()->dispatch(op, stack);
  }

  static bool serves(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    const py::gil_scoped_acquire gil;
    return table().serve(op, stack);
  }
};

// Returns the interpreter, which is never destroyed: threads may be running in it.
ServingInterpreter& interpreter() {
  static auto* const interpreter = new ServingInterpreter;  // NOLINT
  return *interpreter;
}

}  // namespace

void install_native_operators(NativeOperators parts) {
  table().put(std::move(parts));
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
  table().take();
}

std::shared_ptr<DescribedOperator> supported_operator(const c10::OperatorHandle& op) {
  return table().supported_operator(op);
}

bool serves_operators() { return table().is_put(); }

py::dict operator_counts() { return table().counts(); }

void forget_operator_counts() { table().forget_counts(); }

void forget_call_plans() { table().forget(); }

}  // namespace funcol::python
