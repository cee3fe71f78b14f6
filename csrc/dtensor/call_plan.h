// Decisions about calls of operators, made ready to be carried out on local tensors.
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

#include "dtensor/call_key.h"
#include "dtensor/redistributions.h"
#include "pyobjects/specs.h"

namespace funcol::python {

class ServedCall {
 public:
  // `sharding`, an OutputSharding, made ready for calls like `call`, whose arguments are on `stack`. Nothing
  // if PyTorch has to carry it out. Needs the GIL.
  static std::optional<ServedCall> make(const c10::OperatorHandle& op, const DescribedOperator& described,
                                        const torch::jit::Stack& stack, const Call& call,
                                        py::handle sharding);

  // Puts the operator's results in the place of its arguments. If not kServed, nothing is done. An operator
  // that draws random numbers is run by draw(op, spec of the first result, args, kwargs). Needs the GIL.
  Fate run(const c10::OperatorHandle& op, const DescribedOperator& described, const Call& call,
           const py::object& draw, torch::jit::Stack& stack) const;

  // Runs the operator on `stack`, which holds local tensors in the place of DTensors: moves those that have
  // to move, and leaves the local results. `places` are those of the call's tensors, none within a list.
  void run_on_locals(const c10::OperatorHandle& op, at::ArrayRef<uint32_t> places,
                     torch::jit::Stack& stack) const;
  // Returns true if run_on_locals() does all that run() does to tensors: no move is left to Python.
  bool runs_on_locals() const;
  bool moves_tensors() const { return !moves_.empty(); }
  // Returns true while the process groups of all moves exist.
  bool is_current() const;
  // The specs of each result's tensors; none where the result has no placements.
  const std::vector<std::vector<SharedSpecPtr>>& results() const { return results_; }
  size_t heap_bytes() const;

 private:
  using Tensors = c10::SmallVector<at::Tensor, 8>;

  struct Move {
    size_t number;           // of the tensor among the call's
    ExecutionPtr execution;  // null for a norm: Python moves it from `source` to `target`, both without mesh
    py::object source = {};
    py::object target = {};
  };

  bool take_arguments(const c10::OperatorHandle& op, const DescribedOperator& described,
                      const torch::jit::Stack& stack, const Call& call, py::handle sharding);
  bool take_tensor(const DescribedOperator& described, const Call& call, size_t number,
                   const at::Tensor& given, py::handle wanted);
  bool take_results(const c10::OperatorHandle& op, const DescribedOperator& described, const Call& call,
                    py::handle spec);
  bool take_outputs(const c10::OperatorHandle& op, const Call& call, py::handle spec);
  py::object drawn_spec(const Call& call) const;
  void put_arguments(const Call& call, Tensors locals, c10::IValue* arguments) const;
  void return_outputs(const Call& call, const Tensors& held, c10::IValue* results) const;
  void wrap_results(const c10::OperatorHandle& op, py::handle mesh, c10::IValue* results) const;

  std::vector<Move> moves_;
  std::vector<std::pair<size_t, c10::IValue>> replaced_;  // arguments with other values
  std::vector<std::vector<SharedSpecPtr>> results_;
  // For each tensor that the call writes its result to, its number among the call's, and its spec from then
  // on; null for the one that it has.
  std::vector<std::pair<size_t, SharedSpecPtr>> outputs_;
};

}  // namespace funcol::python
