// The kernels of one operator of funcol, by dispatch key.
//
// A file that implements an operator has an object of this class, or a Collective, which has one. Its
// constructor registers the kernels when the library is loaded; schemas.cpp defines the operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/process_group.h"
#include "comm/reduce_op.h"
#include "ops/collectives.h"

namespace funcol {

// Returns all_reduce for funcol::all_reduce.
inline std::string unqualified_name(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name.substr(name.find("::") + 2);
}

// Arguments of start functions, from the arguments or the stack of PyTorch's dispatcher.

inline c10d::ReduceOp as_reduce_op(const c10::IValue& value, const char* op) {
  return reduce_op_from_ivalue(value, op);
}
inline c10d::ReduceOp as_reduce_op(std::string_view name, const char* op) {
  return reduce_op_from_name(name, op);
}

inline GroupPtr as_group(const c10::IValue& value, const char* op) { return group_from_ivalue(value, op); }
inline GroupPtr as_group(std::string_view name, const char* op) { return group_from_name(name, op); }

// Converts sizes, which the dispatcher passes as symbols even if they are numbers.
inline std::vector<int64_t> as_ints(c10::SymIntArrayRef sizes) {
  return C10_AS_INTARRAYREF_SLOW(sizes).vec();
}
inline std::vector<int64_t> as_ints(const c10::IValue& list) {
  return list.isIntList() ? list.toIntVector() : as_ints(c10::SymIntArrayRef(list.toSymIntVector()));
}

// An optional list of sizes as numbers.
class OptionalInts {
 public:
  explicit OptionalInts(at::OptionalSymIntArrayRef sizes) : has_value_(sizes.has_value()) {
    if (has_value_) {
      values_ = as_ints(*sizes);
    }
  }
  explicit OptionalInts(const c10::IValue& sizes) : has_value_(!sizes.isNone()) {
    if (has_value_) {
      values_ = as_ints(sizes);
    }
  }
  operator at::OptionalIntArrayRef() const {  // NOLINT(google-explicit-constructor)
    return has_value_ ? at::OptionalIntArrayRef(values_) : at::OptionalIntArrayRef();
  }

 private:
  bool has_value_;
  std::vector<int64_t> values_;
};

// Converts `given`, an argument of `op`, for a parameter of type `Native`: ReduceOps and groups from names or
// objects, numbers from symbols. `given` is an IValue from the stack, or has the C++ type that the dispatcher
// uses for the schema. The result lives as long as `given`, or until the end of the full expression.
template <typename Native, typename Given>
decltype(auto) start_argument(const Given& given, const char* op) {
  constexpr bool is_on_stack = std::is_same_v<Given, c10::IValue>;
  if constexpr (std::is_same_v<Native, const c10d::ReduceOp&>) {
    return as_reduce_op(given, op);
  } else if constexpr (std::is_same_v<Native, const GroupPtr&>) {
    return as_group(given, op);
  } else if constexpr (std::is_same_v<Native, at::OptionalIntArrayRef>) {
    return OptionalInts(given);
  } else if constexpr (std::is_same_v<Native, at::IntArrayRef> &&
                       (is_on_stack || std::is_same_v<Given, c10::SymIntArrayRef>)) {
    return as_ints(given);
  } else if constexpr (is_on_stack && std::is_same_v<Native, const at::Tensor&>) {
    return given.toTensor();
  } else if constexpr (is_on_stack && std::is_same_v<Native, at::TensorList>) {
    return given.toTensorVector();
  } else if constexpr (is_on_stack && std::is_same_v<Native, const std::vector<std::string>&>) {
    return given.template to<std::vector<std::string>>();
  } else if constexpr (is_on_stack) {
    return given.toInt();
  } else {
    return static_cast<const Given&>(given);
  }
}

// Returns the indices of the receives in `kinds`, the first argument of batch_p2p_ops.
std::vector<size_t> indices_of_receives(const c10::IValue& kinds);

using Arguments = c10::ArrayRef<c10::IValue>;

// A function that starts the collective of an operator from the arguments on the stack; `op` is its name in
// messages.
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

// A function that runs an operator on arguments from the stack and returns its results.
using StackFunction = std::function<std::vector<at::Tensor>(Arguments arguments, const char* op)>;

// Starts a collective and returns the tensors that `finish`, such as as_registered(), makes of the
// StartedCollective.
template <typename Finish>
StackFunction started(StartFromStack start, Finish finish) {
  return [start = std::move(start), finish](Arguments arguments, const char* op) {
    return finish(start(arguments, op));
  };
}

// Returns a boxed kernel that calls `run`; `op` is the name in messages.
torch::CppFunction boxed(std::string op, StackFunction run);

struct OperatorInfo {
  const char* name;          // in schemas.cpp
  const char* op = nullptr;  // the name in messages; null: `name`
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

  // Makes install() use `run`, whose results are plain tensors (see as_registered()), for _c10d_functional's
  // operator. To be called if that has an operator of the same name and schema.
  void add_core_kernel(StackFunction run) const;

 private:
  std::string name_;
  std::string op_;
  torch::Library library_;
};

// Operators that autograd and layers see as PyTorch's: in-place and out= forms, sends, receives and waits.
// Compilers, exporters and debug modes know the _c10d_functional operators, and so does autograd. If a layer
// is active or an input needs a gradient, such an operator becomes _c10d_functional's operator of the same
// name, followed by wait_tensor if funcol's operator returns a pending tensor.

// Registers the kernel that forwards `op`: for the Autograd keys, and as the decomposition that modes
// request.
void forward_to_core(Operator& op);

// Makes an operator with these kernels for devices and for Meta. PyTorch's operator of the same name runs
// `core_run` under install().
template <typename MakeKernel>
Operator forwarded(const OperatorInfo& info, const MakeKernel& make_device_kernel, torch::CppFunction meta,
                   StackFunction core_run) {
  Operator op(info);
  op.set_device_kernel(make_device_kernel);
  op.set_kernel(c10::DispatchKey::Meta, std::move(meta));
  op.add_core_kernel(std::move(core_run));
  forward_to_core(op);
  return op;
}

// Makes a collective that writes into its arguments and returns them. As in PyTorch, they are plain tensors,
// whose Work is in PyTorch's registry until wait_tensor takes it.
Operator in_place(const OperatorInfo& info, const StartFromStack& start);

// A kernel that install() registers for the _c10d_functional operator of this name.
struct CoreKernel {
  std::string name;
  StackFunction run;
};
const std::vector<CoreKernel>& core_kernels();

}  // namespace funcol
