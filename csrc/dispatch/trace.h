// Traces of operators on DTensors, and the programs on local tensors that do the same.
//
// A trace holds the operators that were called, with the redistributions that their sharding decisions
// require, and the specs of the results. A program is the part of a trace that some outputs need. Run on the
// local tensors of DTensors with the same specs, it does what the operators do to them, without DTensors in
// between.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dispatch/call_key.h"
#include "dispatch/call_plan.h"

namespace funcol::python {

// A tensor of a trace: an input, or the result of an operator. Values are numbered in order of appearance.
using ValueId = uint32_t;
inline constexpr ValueId kNoValue = ~ValueId{0};  // an undefined tensor

using CallPlanPtr = std::shared_ptr<const CallPlan>;

class LocalProgram;
using LocalProgramPtr = std::shared_ptr<const LocalProgram>;

// A record of this thread's operators on DTensors while a Recording of it exists. Needs the GIL.
class Trace {
 public:
  // Adds a DTensor that later operators may read.
  void add_input(const at::Tensor& tensor);

  // Records a call before it runs, and its results afterwards.
  void record_call(const Call& call, const CallPlanPtr& plan, const torch::jit::Stack& stack);
  void record_results(const torch::jit::Stack& stack);
  // Records the first operator of `other`, with another result.
  void repeat_first_step(const Trace& other, const at::Tensor& result);
  // Marks the trace as failed: something ran that a trace cannot hold, such as an operator's handler.
  void fail(DescribedPtr handled = nullptr) {
    if (!std::exchange(has_failed_, true)) {
      handled_ = std::move(handled);
    }
  }

  bool has_failed() const { return has_failed_; }
  // Returns the operator whose handler made the trace fail; null if none did.
  const DescribedPtr& handled() const { return handled_; }
  size_t num_steps() const { return steps_.size(); }
  size_t num_values() const { return values_.size(); }
  // Returns true if the first operator is `op`.
  bool begins_with(const char* op) const { return !steps_.empty() && steps_[0].op->name.name == op; }
  // Returns true if this trace begins with the operators of `other`.
  bool starts_with(const Trace& other) const;

  // Returns the number of a recorded tensor; kNoValue for others.
  ValueId value_of(const at::Tensor& tensor) const;
  // Returns true if two values share memory.
  bool share_memory(ValueId one, ValueId other) const {
    return tensors_[one].storage == tensors_[other].storage;
  }
  // Returns true if the value shares memory with one of the first `end` values.
  bool is_view(ValueId value, size_t end) const;
  // Forgets which tensors the values were. Keeps what is known about the values.
  void release_tensors() { tensors_ = {}; }
  size_t heap_bytes() const;

  // Returns the steps from number `begin` on that compute `outputs`, and all steps in which other ranks take
  // part. Returns null if a trace or a program cannot hold that: an output is an input.
  LocalProgramPtr program(at::ArrayRef<ValueId> outputs, size_t begin = 0) const;

 private:
  friend class LocalProgram;

  struct Step {
    DescribedPtr op;
    CallPlanPtr call;
    torch::jit::Stack arguments;                              // None in the place of DTensors
    std::vector<std::pair<uint16_t, ValueId>> operands = {};  // places of DTensors, and their values
    std::vector<uint16_t> places = {};                        // of all tensors
    std::vector<ValueId> results = {};
  };
  struct Value {
    SharedSpecPtr spec;                // null for an input
    std::vector<int64_t> local_sizes;  // of an input
  };
  // Weak references: no other object takes the addresses, and memory is freed as if there were no trace.
  struct Identity {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };

  void add_value(const at::Tensor& tensor, Value value);

  std::vector<Step> steps_;
  std::vector<Value> values_;
  std::vector<Identity> tensors_;
  bool has_failed_ = false;
  DescribedPtr handled_;
};

class LocalProgram {
 public:
  using Locals = c10::SmallVector<at::Tensor, 8>;

  // Returns true if run() may take these local tensors, indexed by their values' numbers. No operator may
  // have a handler. If tensors move, inputs must have the sizes of the traced ones, groups must exist, and no
  // PyTorch context may observe redistributions. Needs the GIL.
  bool can_run(at::ArrayRef<at::Tensor> locals) const;

  // Returns the local outputs. Runs below autograd, and releases the GIL meanwhile.
  Locals run(Locals locals) const;

  // Returns output `i`, which is `local` on this rank, as a DTensor on `mesh`. Needs the GIL.
  at::Tensor wrap(size_t i, at::Tensor local, py::handle mesh) const;

  // Returns the number of values. run() takes a tensor for each; only those of inputs must be defined.
  size_t num_values() const { return num_values_; }
  // Returns the values that the program reads and does not compute.
  const std::vector<ValueId>& inputs() const { return inputs_; }
  // Returns true if tensors move between ranks.
  bool moves_tensors() const { return !moves_.empty(); }
  size_t heap_bytes() const;

 private:
  friend class Trace;

  void add(const Trace::Step& step, uint64_t last);

  // A step. Its parts follow those of earlier steps in the vectors below, so that a replay reads memory in
  // order.
  struct Step {
    c10::OperatorHandle op;
    uint16_t num_arguments;
    uint16_t num_operands;
    uint16_t num_moves;
    uint16_t num_results;
  };
  struct Operand {
    uint16_t place;  // among the arguments
    bool is_last;    // no later step reads the value, and it is not an output
    ValueId value;
  };
  struct Move {
    size_t place;
    OperandMove move;
  };

  std::vector<Step> steps_;
  std::vector<DescribedPtr> ops_;  // of the steps
  torch::jit::Stack arguments_;    // None in the place of DTensors
  std::vector<Operand> operands_;
  std::vector<Move> moves_;
  std::vector<ValueId> results_;
  std::vector<ValueId> outputs_;
  std::vector<SharedSpecPtr> specs_;  // of the outputs; null for undefined tensors
  std::vector<ValueId> inputs_;
  std::vector<std::pair<ValueId, std::vector<int64_t>>> input_sizes_;  // local ones, if tensors move
  size_t num_values_ = 0;
};

// A scope in which this thread's operators on DTensors are recorded in a trace.
class Recording {
 public:
  explicit Recording(Trace& trace);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Returns the trace that this thread records; null if there is none.
  static Trace* current();
};

}  // namespace funcol::python
