// Arguments of start functions, from the arguments or the stack of PyTorch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "comm/process_group.h"
#include "comm/reduce_op.h"

namespace funcol {

inline c10d::ReduceOp as_reduce_op(const c10::IValue& value, const char* op) {
  return reduce_op_from_ivalue(value, op);
}
inline c10d::ReduceOp as_reduce_op(std::string_view name, const char* op) {
  return reduce_op_from_name(name, op);
}

inline GroupPtr as_group(const c10::IValue& value, const char* op) { return group_from_ivalue(value, op); }
inline GroupPtr as_group(std::string_view name, const char* op) { return group_from_name(name, op); }

// Sizes come from the dispatcher as symbols, also where they are numbers.
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

inline std::vector<std::string> as_strings(const c10::IValue& list) {
  std::vector<std::string> strings;
  for (const c10::IValue& item : list.toListRef()) {
    strings.push_back(item.toStringRef());
  }
  return strings;
}

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
    return as_strings(given);
  } else if constexpr (is_on_stack) {
    return given.toInt();
  } else {
    return static_cast<const Given&>(given);
  }
}

}  // namespace funcol
