// The Python function of a collective, made from the collective's start and its operator.
//
//   constexpr CollectiveFunction kGather{"gather", {"dst", "gather_dim"}, start_gather, call::gather};
//   fast<collective_function<kGather>>("gather")
//
// The function takes a tensor, or a list of them, and then the start's arguments in their order; a group is
// two arguments, the group and the tag. It starts the collective on plain tensors, and calls the operator
// where that has more to do: on the meta device, or to record a gradient. It returns NotImplemented for meta
// tensors and a group that this process does not have: PyTorch's operators give the shapes.
#pragma once

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/fast_functions.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "pyobjects/arguments.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {

// `Call` is a Collective, or a function of the same arguments.
template <typename Inputs, typename Call, typename... Native>
struct CollectiveFunction {
  const char* op;                      // the name in messages
  std::array<const char*, 2> numbers;  // names, in messages, of the arguments that are ints or lists of ints
  StartedCollective (*start)(Inputs inputs, Native... arguments);
  const Call& call;
  // Raises what `start` would before it starts. Null where `call` raises the same.
  void (*check)(std::type_identity_t<Inputs> inputs, std::type_identity_t<Native>... arguments) = nullptr;
};

// The deduction guide that the language implies for aggregates; clang before 17 needs it spelled out.
template <typename Inputs, typename Call, typename... Native>
CollectiveFunction(const char*, std::array<const char*, 2>, StartedCollective (*)(Inputs, Native...),
                   const Call&,
                   void (*)(std::type_identity_t<Inputs>, std::type_identity_t<Native>...) = nullptr)
    -> CollectiveFunction<Inputs, Call, Native...>;

// Reads arguments from left to right.
struct ArgumentReader {
  PyObject* next() { return *position++; }
  const char* next_number() { return *number++; }

  Args position;
  const char* op;
  const char* const* number;
};

// One argument: native() for a start, for_operator() for an operator.
template <typename Native>
class ArgumentOf;

template <>
class ArgumentOf<const c10d::ReduceOp&> {
 public:
  explicit ArgumentOf(ArgumentReader& reader) : value_(reduce_op_argument(reader.next(), reader.op)) {}
  const c10d::ReduceOp& native() const { return value_; }
  c10::IValue for_operator() const { return as_ivalue(value_); }

 private:
  c10d::ReduceOp value_;
};

template <>
class ArgumentOf<const GroupPtr&> {
 public:
  explicit ArgumentOf(ArgumentReader& reader) {
    auto* const group = reader.next();
    value_ = group_argument(group, reader.next(), reader.op);
  }
  const GroupPtr& native() const { return value_; }
  c10::IValue for_operator() const { return as_ivalue(value_); }

 private:
  GroupPtr value_;
};

template <>
class ArgumentOf<int64_t> {
 public:
  explicit ArgumentOf(ArgumentReader& reader)
      : value_(int_argument(reader.next(), reader.next_number(), reader.op)) {}
  int64_t native() const { return value_; }
  int64_t for_operator() const { return value_; }

 private:
  int64_t value_;
};

template <>
class ArgumentOf<at::IntArrayRef> {
 public:
  explicit ArgumentOf(ArgumentReader& reader)
      : values_(ints_argument(reader.next(), reader.next_number(), reader.op)) {}
  at::IntArrayRef native() const { return values_; }
  const ArgumentOf& for_operator() const { return *this; }
  operator at::IntArrayRef() const { return values_; }  // NOLINT(google-explicit-constructor)
  operator c10::SymIntArrayRef() const {                // NOLINT(google-explicit-constructor)
    return c10::fromIntArrayRefSlow(values_);
  }

 private:
  std::vector<int64_t> values_;
};

template <>
class ArgumentOf<at::OptionalIntArrayRef> {
 public:
  explicit ArgumentOf(ArgumentReader& reader) : sizes_(reader.next(), reader.op) {}
  at::OptionalIntArrayRef native() const { return sizes_.ints(); }
  at::OptionalSymIntArrayRef for_operator() const { return sizes_.symints(); }

 private:
  SplitSizes sizes_;
};

// The place of the group among a start's arguments.
template <typename... Native>
constexpr size_t position_of_group() {
  constexpr std::array kIsGroup{std::is_same_v<Native, const GroupPtr&>...};
  size_t position = 0;
  while (!kIsGroup[position]) {
    ++position;
  }
  return position;
}

// Without the GIL while the collective starts: it may copy, and take locks.
template <typename Inputs, typename Call, typename... Native>
PyObject* call_with(const CollectiveFunction<Inputs, Call, Native...>& function, Inputs inputs, Args args) {
  if (is_shape_only(inputs, args[1 + position_of_group<Native...>()])) {
    return not_implemented();
  }
  ArgumentReader reader{args + 1, function.op, function.numbers.data()};
  const std::tuple<ArgumentOf<Native>...> arguments{ArgumentOf<Native>(reader)...};
  return std::apply(
      [&](const auto&... argument) {
        const auto started = [&] {
          auto start = function.start(inputs, argument.native()...);
          if constexpr (std::is_same_v<Inputs, at::TensorList>) {
            return as_pending(std::move(start));
          } else {
            return as_sole_pending(std::move(start));
          }
        };
        const auto result = [&] {
          const WithoutGil no_gil;
          if (starts_here(inputs)) {
            return started();
          }
          if (function.check != nullptr) {
            function.check(inputs, argument.native()...);
          }
          return function.call(inputs, argument.for_operator()...);
        };
        return to_python(result()).release().ptr();
      },
      arguments);
}

template <typename Inputs, typename Call, typename... Native>
PyObject* call_with_array(const CollectiveFunction<Inputs, Call, Native...>& function, Args args,
                          Py_ssize_t count) {
  constexpr Py_ssize_t kExpected = 2 + sizeof...(Native);  // the inputs, the tag
  if constexpr (std::is_same_v<Inputs, at::TensorList>) {
    return with_inputs(args, count, kExpected, function.op,
                       [&](at::TensorList inputs) { return call_with(function, inputs, args); });
  } else {
    return with_input(args, count, kExpected, function.op, [&](const at::Tensor& input) {
      return call_with<const at::Tensor&>(function, input, args);
    });
  }
}

template <const auto& function>
PyObject* collective_function(PyObject*, Args args, Py_ssize_t count) {
  return call_with_array(function, args, count);
}

}  // namespace funcol::python
