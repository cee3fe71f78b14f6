// Reduce operators: names, objects, and which of them a backend can apply to a dtype.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace funcol {

// "sum", "avg", "product", "min", "max", "band", "bor" or "bxor", in any case.
// ValueError naming `op` and the names that exist for anything else; "premul_sum" needs its factor and
// therefore comes as a ReduceOp object only.
c10d::ReduceOp reduce_op_from_name(std::string_view name, const char* op);

// The same for an `Any` schema argument: a name or a ReduceOp object. TypeError for anything else.
c10d::ReduceOp reduce_op_from_ivalue(const c10::IValue& value, const char* op);

// The reverse: a name where there is one that says all.
c10::IValue as_ivalue(const c10d::ReduceOp& reduce_op);

std::string_view reduce_op_name(const c10d::ReduceOp& reduce_op);

// True for the operators that act on a complex number part by part: sum, avg, premul_sum.
bool acts_on_complex(const c10d::ReduceOp& reduce_op);

// True for dtypes that Gloo can put on the wire without a change of dtype.
bool gloo_carries(c10::ScalarType dtype);

// Raises before anything is sent if `backend` cannot apply `reduce_op` to `dtype`:
// NotImplementedError if the backend lacks the operator, TypeError if the operator is not defined for
// the dtype (bitwise on floats, min on complex numbers, avg on bool, ...). Backends that are not known
// here decide for themselves.
void check_reduce_op(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype, std::string_view backend,
                     const char* op);

// True where check_reduce_op passes on every backend, so that the backend need not be asked for.
bool is_supported_everywhere(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype);

}  // namespace funcol
