// Calls of operators on DTensors, as they come from PyTorch's dispatcher: a key for what a decision about a
// call depends on, and the call's Python arguments.
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
enum class ServeStatus : uint8_t {
  kServed,
  kWatched,     // a context of PyTorch wants to see the redistribution, or its log wants the decision
  kHandler,     // the operator has a handler, of PyTorch or of the program
  kKind,        // no operator of its kind is served
  kArgument,    // an argument that keys do not hold: a subclass of DTensor, a generator
  kSpec,        // a spec that C++ has no values for
  kFull,        // served, but the table of calls is full, and did not admit this one
  kDecision,    // the decision is not one that C++ carries out
  kLocalShape,  // a local tensor that has to move has another shape than its spec says
  kWrite,       // a write that has to reach a copy of the tensor
  kNumStatuses,
};

// The schema of an operator, as far as calls on DTensors need it.
struct DescribedOperator {
  enum class Results { kNew, kFirstArgument, kOut, kNumbers, kNone, kNotServed };

  c10::OperatorHandle handle;
  c10::OperatorName name;    // which outlives what the handle refers to
  uint64_t number;           // of this description, never used again
  py::object overload = {};  // the OpOverload
  Results results = Results::kNotServed;
  bool writes = false;
  bool lists_operands = false;  // PyTorch's rules list the tensors in lists
  bool draws = false;           // random numbers, as DTensor's dispatcher knows them
  // Pairs of (argument, result) that share memory without a write.
  std::vector<std::pair<size_t, size_t>> views = {};
  std::vector<bool> is_aliased = {};  // arguments whose memory the results may share
  // Arguments whose values a decision does not depend on, apart from their kind and sign.
  std::vector<bool> is_factor = {};

  bool has_handler = false;
  uint64_t handlers_version = 0;  // of the dispatcher's handlers at which has_handler was read

  bool is_current = true;  // false once the propagator's tables may have changed
  std::array<size_t, static_cast<size_t>(ServeStatus::kNumStatuses)> counts = {};
};

// The propagator of `dispatcher`, DTensor's, has tables that say which arguments a decision depends on.
DescribedOperator describe_operator(const c10::OperatorHandle& op, py::handle dispatcher);

// What a decision about a call depends on, as words: the description's number, then the arguments.
struct CallWords {
  c10::SmallVector<uint64_t, 24> words;

  size_t hash() const { return hash_of_words(words); }
};

// The words in a table.
struct CallKey : WordKey {
  // NOLINTNEXTLINE(google-explicit-constructor): tables convert
  CallKey(const CallWords& call) : WordKey{{call.words.begin(), call.words.end()}} {}

  // Returns true if a tensor is on the mesh, or by chance.
  bool is_on(uint64_t mesh_id) const;

  friend bool operator==(const CallKey&, const CallKey&) = default;
  friend bool operator==(const CallKey& a, const CallWords& b) {
    return std::ranges::equal(a.words, b.words);
  }
};

// A tensor among the arguments, and where on the stack it stands: in a list, or by itself with `index` -1.
struct TensorArgument {
  size_t place;
  int64_t index;
  PyObject* dtensor;       // held by its tensor on the stack; null for a plain tensor, which is replicated
  bool is_number = false;  // a number that PyTorch has wrapped in a tensor
};

struct Call {
  std::shared_ptr<const DescribedOperator> op;
  CallWords key;
  c10::SmallVector<TensorArgument, 8> tensors;

  const c10::FunctionSchema& schema() const { return op->handle.schema(); }
  // The first DTensor; there is one in every call that is read.
  PyObject* first_dtensor() const;
  // The arguments on the stack, whose last ones they are.
  at::ArrayRef<c10::IValue> arguments(const torch::jit::Stack& stack) const {
    const auto count = schema().arguments().size();
    return at::ArrayRef<c10::IValue>(stack.data() + (stack.size() - count), count);  // NOLINT: {} is a list
  }
  // A tensor of the call.
  const at::Tensor& tensor(const torch::jit::Stack& stack, const TensorArgument& one) const {
    const auto& value = arguments(stack)[one.place];
    return one.index < 0 ? value.toTensor() : value.toListRef()[one.index].toTensor();
  }
};

// Reads the arguments on the stack. kServed if the key holds the call; otherwise why it does not.
ServeStatus read_call(std::shared_ptr<const DescribedOperator> op, const torch::jit::Stack& stack,
                      Call& call);

// The arguments and keyword arguments with which PyTorch's dispatcher calls Python: those at their defaults
// are left out at the end, and among keywords.
std::pair<py::tuple, py::dict> python_arguments(const c10::OperatorHandle& op,
                                                const torch::jit::Stack& stack);

}  // namespace funcol::python
