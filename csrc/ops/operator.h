// One operator of funcol, as PyTorch's dispatcher knows it: a schema, and a kernel for each dispatch key.
//
// A file that implements an operator has an object of this class, or a Collective, which has one. Its
// constructor defines the operator when the library is loaded.
#pragma once

#include <torch/library.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ops/collectives.h"
#include "ops/start_arguments.h"

namespace funcol {

using Arguments = c10::ArrayRef<c10::IValue>;

// Starts the collective of an operator from the arguments on the stack; `op` is its name in messages.
using StartFromStack = std::function<StartedCollective(Arguments arguments, const char* op)>;

// Calls `start` with one argument from the stack for each of its parameters.
template <typename... Native>
StartFromStack from_stack(StartedCollective (*start)(Native...)) {
  return [start](Arguments arguments, const char* op) {
    TORCH_INTERNAL_ASSERT(arguments.size() == sizeof...(Native), op);
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return start(start_argument<Native>(arguments[i], op)...);
    }
    (std::index_sequence_for<Native...>());
  };
}

// Runs an operator on arguments from the stack; its results.
using StackFunction = std::function<std::vector<at::Tensor>(Arguments arguments, const char* op)>;

// Starts a collective and returns the tensors that `finish`, such as as_registered(), makes of the
// StartedCollective.
template <typename Finish>
StackFunction started(StartFromStack start, Finish finish) {
  return [start = std::move(start), finish](Arguments arguments, const char* op) {
    return finish(start(arguments, op));
  };
}

// Replaces the arguments on the stack by `results`: by the only one where the operator returns a tensor.
void return_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::vector<at::Tensor> results);

// A boxed kernel that calls `run`.
torch::CppFunction boxed(StackFunction run);

struct OperatorInfo {
  const char* schema;             // "broadcast(Tensor input, int src, Any group_name) -> Tensor"
  const char* op = nullptr;       // the name in messages; null: the name in the schema
  bool needs_contiguous = false;  // whether compilers have to pass contiguous tensors
  bool is_random = false;         // whether results differ between calls with equal arguments
};

class Operator {
 public:
  explicit Operator(const OperatorInfo& info);

  const std::string& name() const { return name_; }
  const char* op() const { return op_.c_str(); }

  void set_kernel(c10::DispatchKey key, torch::CppFunction kernel);

  // Registers a kernel for every device with a c10d backend; `make_kernel` returns a new one at each call.
  template <typename MakeKernel>
  void set_device_kernel(const MakeKernel& make_kernel) {
    using Key = c10::DispatchKey;
    for (const auto key : {Key::CPU, Key::CUDA, Key::CompositeExplicitAutograd}) {
      set_kernel(key, make_kernel());
    }
  }

  // To be called if _c10d_functional has an operator of the same name and schema: install() puts `run` in its
  // place, whose results are plain tensors (see as_registered()).
  void serve_core(StackFunction run) const;

 private:
  std::string name_;
  std::string op_;
  torch::Library library_;
};

// The kernels that install() puts under _c10d_functional's operators, by name.
struct CoreKernel {
  std::string name;
  StackFunction run;
};
const std::vector<CoreKernel>& core_kernels();

}  // namespace funcol
