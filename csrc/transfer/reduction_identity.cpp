#include "transfer/reduction_identity.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <string>

#include "transfer/op_names.h"

namespace funcol {
namespace {

c10::Scalar largest(c10::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) {
    return std::numeric_limits<double>::infinity();
  }
  const auto num_bits = 8 * c10::elementSize(dtype);
  return c10::isSignedType(dtype) ? c10::Scalar(static_cast<int64_t>(~uint64_t{0} >> (65 - num_bits)))
                                  : c10::Scalar(~uint64_t{0} >> (64 - num_bits));
}

c10::Scalar smallest(c10::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) {
    return -std::numeric_limits<double>::infinity();
  }
  return c10::isSignedType(dtype) ? c10::Scalar(-largest(dtype).toLong() - 1) : c10::Scalar(int64_t{0});
}

}  // namespace

c10::Scalar neutral_element(PartialOp op, c10::ScalarType dtype) {
  const bool is_bool = dtype == c10::ScalarType::Bool;
  switch (op) {
    case PartialOp::kSum:
    case PartialOp::kBor:
    case PartialOp::kBxor:
      return is_bool ? c10::Scalar(false) : c10::Scalar(int64_t{0});
    case PartialOp::kProduct:
      return is_bool ? c10::Scalar(true) : c10::Scalar(int64_t{1});
    case PartialOp::kBand:
      return is_bool ? c10::Scalar(true)
                     : (c10::isSignedType(dtype) ? c10::Scalar(int64_t{-1}) : largest(dtype));
    case PartialOp::kMin:
    case PartialOp::kMax:
      TORCH_CHECK_TYPE(!c10::isComplexType(dtype), "funcol::", kRedistribute, ": P(",
                       std::string(to_string(op)), ") of ", dtype,
                       ": complex numbers have no order. Use P(sum).");
      if (is_bool) {
        return op == PartialOp::kMin;
      }
      return op == PartialOp::kMin ? largest(dtype) : smallest(dtype);
    case PartialOp::kAvg:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "funcol::", kRedistribute, ": avg has no neutral element");
}

}  // namespace funcol
