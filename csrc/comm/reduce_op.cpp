#include "comm/reduce_op.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "comm/custom_class.h"
#include "comm/process_group.h"

namespace funcol {
namespace {

using Kind = c10d::ReduceOp::RedOpType;

constexpr std::array<std::pair<std::string_view, Kind>, 8> kNames = {{
    {"sum", Kind::SUM},
    {"avg", Kind::AVG},
    {"product", Kind::PRODUCT},
    {"min", Kind::MIN},
    {"max", Kind::MAX},
    {"band", Kind::BAND},
    {"bor", Kind::BOR},
    {"bxor", Kind::BXOR},
}};

bool equals_ignoring_case(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

// Returns true if the operator acts on the real and imaginary parts of a complex number separately.
bool acts_on_complex(Kind kind) { return kind == Kind::SUM || kind == Kind::AVG || kind == Kind::PREMUL_SUM; }

bool is_bitwise(Kind kind) { return kind == Kind::BAND || kind == Kind::BOR || kind == Kind::BXOR; }

}  // namespace

c10d::ReduceOp reduce_op_from_name(std::string_view name, const char* op) {
  for (const auto& [known, kind] : kNames) {
    if (equals_ignoring_case(name, known)) {
      return {kind};
    }
  }
  TORCH_CHECK_VALUE(!equals_ignoring_case(name, "premul_sum"), "funcol::", op,
                    ": reduce op 'premul_sum' needs its factor. Pass the ReduceOp object that "
                    "torch.distributed._make_nccl_premul_sum(factor) returns.");
  TORCH_CHECK_VALUE(false, "funcol::", op, ": unknown reduce op '", name,
                    "'. Expected one of sum, avg, product, min, max, band, bor, bxor.");
}

c10d::ReduceOp reduce_op_from_ivalue(const c10::IValue& value, const char* op) {
  if (value.isString()) {
    return reduce_op_from_name(value.toStringView(), op);
  }
  if (const auto reduce_op = custom_class<c10d::ReduceOp>(value)) {
    return *reduce_op;
  }
  TORCH_CHECK_TYPE(false, "funcol::", op, ": the reduce op is a ", value.tagKind(),
                   ". Expected a name such as 'sum', or a torch.distributed.ReduceOp.");
}

c10::IValue as_ivalue(const c10d::ReduceOp& reduce_op) {
  if (reduce_op.op_ == Kind::PREMUL_SUM) {  // has a factor
    return c10::IValue(c10::make_intrusive<c10d::ReduceOp>(reduce_op));
  }
  return std::string(reduce_op_name(reduce_op));
}

std::string_view reduce_op_name(const c10d::ReduceOp& reduce_op) {
  for (const auto& [name, kind] : kNames) {
    if (kind == reduce_op.op_) {
      return name;
    }
  }
  return reduce_op.op_ == Kind::PREMUL_SUM ? "premul_sum" : "unused";
}

bool gloo_carries(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Char:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Bool:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return true;
    default:
      return false;
  }
}

bool is_supported_everywhere(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype) {
  switch (reduce_op.op_) {
    case Kind::SUM:
    case Kind::PRODUCT:
    case Kind::MIN:
    case Kind::MAX:
      return gloo_carries(dtype);
    default:
      return false;
  }
}

void check_reduce_op(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype, std::string_view backend,
                     const char* op) {
  const Kind kind = reduce_op.op_;
  const auto name = reduce_op_name(reduce_op);
  TORCH_CHECK_VALUE(kind != Kind::UNUSED, "funcol::", op,
                    ": ReduceOp.UNUSED reduces nothing. Pass a real one.");
  if (c10::isComplexType(dtype)) {
    TORCH_CHECK_TYPE(acts_on_complex(kind), "funcol::", op, ": reduce op '", name,
                     "' is not defined for complex tensors (", dtype,
                     "). Use sum or avg, or reduce the parts.");
    dtype = c10::toRealValueType(dtype);
  }
  TORCH_CHECK_TYPE(!is_bitwise(kind) || c10::isIntegralType(dtype, /*includeBool=*/true), "funcol::", op,
                   ": reduce op '", name, "' needs an integral or bool tensor, got ", dtype, ".");
  TORCH_CHECK_TYPE(kind != Kind::AVG || dtype != c10::ScalarType::Bool, "funcol::", op,
                   ": reduce op 'avg' is not defined for bool tensors. Convert to a floating dtype first.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      kind != Kind::AVG || backend != "mpi", "funcol::", op,
      ": backend 'mpi' has no reduce op 'avg'. Use sum and divide by the group size.");
  if (backend != "gloo") {
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      kind != Kind::PREMUL_SUM, "funcol::", op,
      ": backend 'gloo' has no reduce op 'premul_sum'. Multiply first, then use sum.");
  TORCH_CHECK_TYPE(kind != Kind::AVG || !c10::isIntegralType(dtype, /*includeBool=*/true), "funcol::", op,
                   ": backend 'gloo' cannot average ", dtype, " tensors. Convert to a floating dtype first.");
  TORCH_CHECK_TYPE(gloo_carries(dtype), "funcol::", op, ": backend 'gloo' cannot reduce ", dtype,
                   " tensors. Convert to float, double, half, bfloat16, int8, uint8, int32 or int64 first.");
}

}  // namespace funcol
