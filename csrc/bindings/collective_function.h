// The Python function of a collective, made from the collective's start and its operator.
//
//   constexpr CollectiveFunction kGather{"gather", {"dst", "gather_dim"}, start_gather, call::gather};
//   fast<collective_function<kGather>>("gather")
//
// The function takes a tensor, or a list of them, and then the start's arguments in their order; a group is
// two arguments, the group and the tag. For plain tensors it starts the collective itself; for meta
// tensors and gradients it calls the operator. It returns NotImplemented for meta
// tensors and a group that this process does not have: PyTorch's operators give the shapes.
#pragma once

#include <torch/csrc/Exceptions.h>

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

// The parts of a collective's Python function. `Call` is a Collective, or a function of the same arguments.
template <typename Inputs, typename Call, typename... Native>
struct CollectiveFunction {
  const char* op;                      // the name in messages
  std::array<const char*, 2> numbers;  // names, in messages, of the arguments that are ints or lists of ints
  StartedCollective (*start)(Inputs inputs, Native... arguments);
  const Call& call;
  // Raises what `start` would before it starts. Null if `call` raises the same.
  void (*check)(std::type_identity_t<Inputs> inputs, std::type_identity_t<Native>... arguments) = nullptr;
};

// The deduction guide that the language implies for aggregates; clang before 17 needs it spelled out.
template <typename Inputs, typename Call, typename... Native>
CollectiveFunction(const char*, std::array<const char*, 2>, StartedCollective (*)(Inputs, Native...),
                   const Call&,
                   void (*)(std::type_identity_t<Inputs>, std::type_identity_t<Native>...) = nullptr)
    -> CollectiveFunction<Inputs, Call, Native...>;

// A reader of arguments, from left to right.
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

// A plain tensor; undefined for another one.
template <>
class ArgumentOf<const at::Tensor&> {
 public:
  explicit ArgumentOf(ArgumentReader& reader) : value_(tensor_argument(reader.next(), reader.op)) {}
  const at::Tensor& native() const { return value_; }

 private:
  at::Tensor value_;
};

// A list of plain tensors; empty for other lists.
template <>
class ArgumentOf<at::TensorList> {
 public:
  explicit ArgumentOf(ArgumentReader& reader) {
    if (!tensors_argument(reader.next(), values_, reader.op)) {
      values_.clear();
    }
  }
  at::TensorList native() const { return values_; }

 private:
  std::vector<at::Tensor> values_;
};

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

// Returns the place of the group among a start's arguments.
template <typename... Native>
constexpr size_t position_of_group() {
  constexpr std::array kIsGroup{std::is_same_v<Native, const GroupPtr&>...};
  size_t position = 0;
  while (!kIsGroup[position]) {
    ++position;
  }
  return position;
}

// Calls `use` with the arguments that follow the inputs, each as an ArgumentOf.
template <typename... Native, typename Use>
PyObject* with_arguments(at::TensorList inputs, Args args, const char* op, const char* const* numbers,
                         const Use& use) {
  if (is_shape_only(inputs, args[1 + position_of_group<Native...>()])) {
    return not_implemented();
  }
  ArgumentReader reader{args + 1, op, numbers};
  const std::tuple<ArgumentOf<Native>...> arguments{ArgumentOf<Native>(reader)...};
  return std::apply(use, arguments);
}

// Calls `call` with the first of `expected` arguments, a plain tensor or a list of them. Returns
// NotImplemented for other arguments.
template <typename Inputs, typename Call>
PyObject* with_inputs(Args args, Py_ssize_t count, Py_ssize_t expected, const char* op, const Call& call) {
  HANDLE_TH_ERRORS
  check_count(count, expected, op);
  constexpr bool kIsList = std::is_same_v<Inputs, at::TensorList>;
  const bool has_items = kIsList && (PyList_Check(args[0]) || PyTuple_Check(args[0]));
  auto* const* const objects = has_items ? PySequence_Fast_ITEMS(args[0]) : args;
  const auto num_objects = has_items ? PySequence_Fast_GET_SIZE(args[0]) : (kIsList ? 0 : 1);
  for (Py_ssize_t i = 0; i < num_objects; ++i) {
    refuse_dtensor(objects[i], op);
  }
  if constexpr (kIsList) {
    std::vector<at::Tensor> inputs;
    const bool are_plain = tensors_argument(args[0], inputs, op);
    check_no_tangents(objects, num_objects, op);
    return are_plain ? call(inputs) : not_implemented();
  } else {
    const auto input = tensor_argument(args[0], op);
    check_no_tangents(objects, num_objects, op);
    return input.defined() ? call(input) : not_implemented();
  }
  END_HANDLE_TH_ERRORS
}

// Calls the collective. Releases the GIL while it starts: it may copy, and take locks.
template <typename Inputs, typename Call, typename... Native>
PyObject* call_with_array(const CollectiveFunction<Inputs, Call, Native...>& function, Args args,
                          Py_ssize_t count) {
  constexpr Py_ssize_t kExpected = 2 + sizeof...(Native);  // the inputs, the tag
  return with_inputs<Inputs>(args, count, kExpected, function.op, [&](Inputs inputs) {
    const auto call = [&](const auto&... argument) {
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
        if (can_bypass_dispatcher(inputs)) {
          return started();
        }
        if (function.check != nullptr) {
          function.check(inputs, argument.native()...);
        }
        return function.call(inputs, argument.for_operator()...);
      };
      return to_python(result()).release().ptr();
    };
    return with_arguments<Native...>(inputs, args, function.op, function.numbers.data(), call);
  });
}

// The Python function of a C++ function, which is called without the GIL. It returns None if that returns
// true, or the tensor that it returns; NotImplemented for false, or an undefined tensor.
template <typename Result, typename Inputs, typename... Native>
struct DirectFunction {
  const char* op;  // as in CollectiveFunction, like `numbers`
  std::array<const char*, 2> numbers;
  Result (*call)(Inputs inputs, Native... arguments);
};

// The deduction guide, as for CollectiveFunction.
template <typename Result, typename Inputs, typename... Native>
DirectFunction(const char*, std::array<const char*, 2>, Result (*)(Inputs, Native...))
    -> DirectFunction<Result, Inputs, Native...>;

template <typename Result, typename Inputs, typename... Native>
PyObject* call_with_array(const DirectFunction<Result, Inputs, Native...>& function, Args args,
                          Py_ssize_t count) {
  constexpr Py_ssize_t kExpected = 2 + sizeof...(Native);
  return with_inputs<Inputs>(args, count, kExpected, function.op, [&](Inputs inputs) {
    const auto call = [&](const auto&... argument) {
      auto result = [&] {
        const WithoutGil no_gil;
        return function.call(inputs, argument.native()...);
      }();
      if constexpr (std::is_same_v<Result, bool>) {
        return result ? Py_NewRef(Py_None) : not_implemented();
      } else {
        return result.defined() ? THPVariable_Wrap(std::move(result)) : not_implemented();
      }
    };
    return with_arguments<Native...>(inputs, args, function.op, function.numbers.data(), call);
  });
}

template <const auto& function>
PyObject* collective_function(PyObject*, Args args, Py_ssize_t count) {
  return call_with_array(function, args, count);
}

}  // namespace funcol::python
