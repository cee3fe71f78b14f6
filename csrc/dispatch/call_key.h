// Operator calls on DTensors, as PyTorch's dispatcher makes them: a key of all that a decision about a call
// depends on, and the call's Python arguments.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "layout/word_key.h"

namespace funcol::python {

// The outcome of a call: it takes the fast path, or falls back to PyTorch for this reason.
enum class FastPathStatus : uint8_t {
  kHandled,
  kObserved,       // PyTorch observes redistributions or logs decisions
  kCustomHandler,  // the operator has a handler, of PyTorch or of the program
  kOperatorKind,   // the fast path does not support this kind of operator
  kArgument,       // an argument that keys cannot represent: a subclass of DTensor, a generator
  kSpec,           // a spec that C++ does not support
  kTableFull,      // the call took the fast path, but the table of calls has no room for it
  kDecision,       // a decision that C++ does not carry out
  kLocalShape,     // the shape of a local tensor to redistribute differs from its spec
  kWrite,          // a write that has to reach a copy of the tensor
  kEndedGroup,     // a process group of the mesh was aborted or reconfigured
  kNumStatuses,
};

// The parts of an operator's schema that calls on DTensors need.
struct DescribedOperator {
  enum class ResultKind { kNew, kFirstArgument, kOut, kNumbers, kNone, kUnsupported };

  c10::OperatorHandle handle;
  c10::OperatorName name;    // remains valid when the handle is not
  uint64_t number;           // unique to this description, never reused
  py::object overload = {};  // the OpOverload
  ResultKind result_kind = ResultKind::kUnsupported;
  bool writes = false;
  bool lists_operands = false;  // PyTorch's rules take each tensor in a list as an operand
  bool draws = false;           // random numbers, according to DTensor's dispatcher
  // Pairs of (argument, result) that share memory without a write.
  std::vector<std::pair<size_t, size_t>> views = {};
  std::vector<bool> is_aliased = {};  // arguments whose memory the results may share
  // Arguments whose values a decision does not depend on, apart from their kind and sign.
  std::vector<bool> is_factor = {};

  // The last answer of has_handler(), and the version of the dispatcher's handlers that it is for. Each
  // loss_parallel() scope makes two versions.
  bool has_handler = false;
  uint64_t handlers_version = 0;

  bool is_current = true;  // false once the propagator's tables may have changed
  std::array<size_t, static_cast<size_t>(FastPathStatus::kNumStatuses)> counts = {};
};

using DescribedPtr = std::shared_ptr<DescribedOperator>;

// Returns the description of `op`. Tables of the propagator of `dispatcher`, DTensor's dispatcher, define
// which arguments a decision depends on.
DescribedOperator describe_operator(const c10::OperatorHandle& op, py::handle dispatcher);

// All that a decision about a call depends on, as words: description number, arguments, default dtype.
struct CallWords {
  c10::SmallVector<uint64_t, 24> words;

  size_t hash() const { return hash_of_words(words); }
};

// The words of a call as a table key.
struct CallKey : WordKey {
  // NOLINTNEXTLINE(google-explicit-constructor): tables convert
  CallKey(const CallWords& call) : WordKey{{call.words.begin(), call.words.end()}} {}

  // Returns true if a tensor is on the mesh. May return true for other calls by chance.
  bool is_on(uint64_t mesh_id) const;

  friend bool operator==(const CallKey&, const CallKey&) = default;
  friend bool operator==(const CallKey& a, const CallWords& b) {
    return std::ranges::equal(a.words, b.words);
  }
};

// A tensor among the arguments: the place of its argument, and its index in a list, or -1 if the argument is
// the tensor itself.
struct TensorArgument {
  size_t place;
  int64_t index;
  PyObject* dtensor;       // owned by its tensor on the stack; null for a plain tensor, which is replicated
  bool is_number = false;  // a number that PyTorch has wrapped in a tensor
};

struct Call {
  DescribedPtr op;
  CallWords key;
  c10::SmallVector<TensorArgument, 8> tensors;

  const c10::FunctionSchema& schema() const { return op->handle.schema(); }
  // Returns the first DTensor. Every call that read_call() accepts has one.
  PyObject* first_dtensor() const;
  // Returns the arguments, which are the last values on the stack.
  at::ArrayRef<c10::IValue> arguments(const torch::jit::Stack& stack) const {
    const auto count = schema().arguments().size();
    return at::ArrayRef<c10::IValue>(stack.data() + (stack.size() - count), count);  // NOLINT: {} is a list
  }
  // Returns the tensor that `one` describes.
  const at::Tensor& tensor(const torch::jit::Stack& stack, const TensorArgument& one) const {
    const auto& value = arguments(stack)[one.place];
    return one.index < 0 ? value.toTensor() : value.toListRef()[one.index].toTensor();
  }
};

// Reads the arguments on the stack. Returns kHandled if the key represents the call, otherwise why it does
// not.
FastPathStatus read_call(DescribedPtr op, const torch::jit::Stack& stack, Call& call);

// Returns the positional and keyword arguments with which PyTorch's dispatcher calls Python: without keyword
// arguments and trailing positional ones that equal their defaults.
std::pair<py::tuple, py::dict> python_arguments(const c10::OperatorHandle& op,
                                                const torch::jit::Stack& stack);

}  // namespace funcol::python
