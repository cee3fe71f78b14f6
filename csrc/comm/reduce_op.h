// Reduce operators: names, objects, and which of them a backend can apply to a dtype.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace funcol {

// Returns the reduce operator "sum", "avg", "product", "min", "max", "band", "bor" or "bxor", in any case.
// Raises ValueError naming `op` for other names; "premul_sum" has a factor, so it needs a ReduceOp object.
c10d::ReduceOp reduce_op_from_name(std::string_view name, const char* op);

// Returns the reduce operator of an `Any` schema argument: a name or a ReduceOp object. Raises TypeError for
// anything else.
c10d::ReduceOp reduce_op_from_ivalue(const c10::IValue& value, const char* op);

// Returns `reduce_op` as an op's argument: its name, or the object if the operator has a factor.
c10::IValue as_ivalue(const c10d::ReduceOp& reduce_op);

std::string_view reduce_op_name(const c10d::ReduceOp& reduce_op);

// Returns true if Gloo can send the dtype without a conversion.
bool gloo_carries(c10::ScalarType dtype);

// Raises if `backend` cannot apply `reduce_op` to `dtype`: NotImplementedError if the backend lacks the
// operator, TypeError if the operator is not defined for the dtype (bitwise on floats, min on complex
// numbers, avg on bool, ...). Unknown backends decide for themselves.
void check_reduce_op(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype, std::string_view backend,
                     const char* op);

// Returns true if check_reduce_op() passes on every backend, so that the backend's name need not be looked
// up.
bool is_supported_everywhere(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype);

}  // namespace funcol
