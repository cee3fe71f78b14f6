// Decisions about operator calls, made in C++ where possible and otherwise by the propagator in Python, and
// plans that carry them out on local tensors.
//
// PyTorch counterpart: the part of OpDispatcher that follows a decision.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dispatch/call_key.h"
#include "dispatch/fast_dispatch.h"
#include "pyobjects/specs.h"
#include "transfer/dtensors/redistribute_local_tensor.h"

namespace funcol::python {

struct DecidedCall {
  // The DTensorSpecs that the operator needs, by the tensors' numbers in the call.
  std::vector<std::pair<size_t, py::object>> inputs = {};
  // Places of arguments to replace, and their new values.
  std::vector<std::pair<size_t, c10::IValue>> replaced = {};
  // The spec of the result, a tuple of specs for several results, or None, as in OutputSharding.
  py::object output = {};
  // PyTorch's error if the operator has no result for these shapes; then there is no decision.
  py::object error = {};
};

// Decides a call of an operator. Returns nullopt if PyTorch's dispatcher has to run the call. Raises the
// propagator's errors.
std::optional<DecidedCall> decide_call(const NativeOperators& parts, const Call& call,
                                       const torch::jit::Stack& stack);  // in decide_call.cpp

class CallPlan {
 public:
  // Prepares a decision for calls that equal `call`, whose arguments are on `stack`. Returns nullopt if
  // PyTorch has to carry it out. Needs the GIL.
  static std::optional<CallPlan> make(const Call& call, const torch::jit::Stack& stack,
                                      const DecidedCall& decided);

  // Runs the call, and replaces the arguments on the stack with its results. If it does not return kHandled,
  // nothing has been done. Runs an operator that draws random numbers by draw(op, spec of the first result,
  // args, kwargs). Needs the GIL.
  FastPathStatus run(const Call& call, const py::object& draw, torch::jit::Stack& stack) const;

  // A tensor to redistribute before the operator runs.
  struct Move {
    size_t number;  // of the tensor among the call's
    OperandMove move;
  };

  const std::vector<Move>& moves() const { return moves_; }
  // Returns the places of arguments to replace, and their new values.
  const std::vector<std::pair<size_t, c10::IValue>>& replaced() const { return replaced_; }
  bool moves_tensors() const { return !moves_.empty(); }
  // Returns true while the process groups of all moves exist.
  bool is_current() const;
  // Returns the number of results, or the specs of a result's tensors: none if it has no placements.
  size_t num_results() const { return ends_.size(); }
  at::ArrayRef<SharedSpecPtr> specs_of(size_t result) const {
    const size_t begin = result == 0 ? 0 : ends_[result - 1];
    return {specs_.data() + begin, ends_[result] - begin};
  }
  size_t heap_bytes() const;

 private:
  using Tensors = c10::SmallVector<at::Tensor, 8>;

  bool add_input(const Call& call, size_t number, const at::Tensor& given, py::handle wanted);
  bool add_result_specs(const Call& call, py::handle spec);
  bool add_out_specs(const Call& call, py::handle spec);
  py::object drawn_spec(const Call& call) const;
  void set_arguments(const Call& call, Tensors locals, c10::IValue* arguments) const;
  void return_outputs(const Call& call, const Tensors& dtensors, c10::IValue* results) const;
  void wrap_results(const Call& call, c10::IValue* results) const;

  std::vector<Move> moves_;
  std::vector<std::pair<size_t, c10::IValue>> replaced_;
  c10::SmallVector<SharedSpecPtr, 1> specs_;  // of all results
  c10::SmallVector<uint32_t, 2> ends_;        // of each result's specs among them
  // For each tensor that the call writes its result to: its number among the call's tensors, and its new
  // spec, or null if the spec does not change.
  std::vector<std::pair<size_t, SharedSpecPtr>> outputs_;
};

}  // namespace funcol::python
