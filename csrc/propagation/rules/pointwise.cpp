#include "propagation/rules/pointwise.h"

#include <algorithm>
#include <cmath>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol {
namespace pointwise_rules {
namespace {

bool is_operand(std::string_view name) {
  constexpr std::array<std::string_view, 6> kNoOperands{"scalars",    "lr",        "state_steps",
                                                        "grad_scale", "found_inf", "inv_scale"};
  return std::ranges::find(kNoOperands, name) == kNoOperands.end();
}

void linear(const OpCall& call, RowList& rows) {
  if (call.tensors.size() == 1) {
    rows.add_arithmetic_partials(kLinearOps);
  }
}

void increasing(const OpCall& call, RowList& rows) {
  if (call.tensors.size() == 1) {
    rows.add_arithmetic_partials(kOrderOps);
  }
}

PartialOp reversed(PartialOp op) { return op == PartialOp::kMax ? PartialOp::kMin : PartialOp::kMax; }

void decreasing(const OpCall& call, RowList& rows) {
  for (const auto op : kOrderOps) {
    if (call.tensors.size() == 1) {
      rows.add_arithmetic(partial(reversed(op)), std::vector{partial(op)});
    }
  }
}

// Adds a row for each op and each tensor, in which this tensor alone is partial.
void add_one_partial(const OpCall& call, RowList& rows, PartialOps ops) {
  for (const auto op : ops) {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      std::vector<Placement> inputs(call.tensors.size(), replicate());
      inputs[i] = partial(op);
      rows.add_arithmetic(partial(op), std::move(inputs));
    }
  }
}

bool is_signed(const OpCall& call) {
  return std::ranges::none_of(call.tensors, [](const auto& meta) { return is_unsigned(meta.dtype); });
}

// Adds the rows of a product with a factor. An unknown factor may have any sign. A factor that is not finite
// gives NaN where a part is 0, or where parts have different signs.
void scaled(const OpCall& call, RowList& rows, std::optional<double> factor) {
  if (factor && !std::isfinite(*factor)) {
    return;
  }
  linear(call, rows);
  if (factor && *factor > 0) {
    increasing(call, rows);
  } else if (factor && *factor < 0 && is_signed(call)) {
    decreasing(call, rows);
  }
}

void negated(const OpCall& call, RowList& rows) { scaled(call, rows, -1.0); }

// Returns the number beside the tensor in a product or a quotient, also for an element of lists.
std::optional<double> other_number(const OpCall& call) {
  for (const auto* name : {"other", "scalar", "scalars"}) {
    if (const auto number = real_number(call, name)) {
      return number;
    }
  }
  return std::nullopt;
}

// Adds the rows of factors[0] * self + factors[1] * other, one of which may be a number. A replicated summand
// commutes with averages and extremes, but in a sum it would count once for each rank.
void weighted_sum(const OpCall& call, RowList& rows, const std::vector<double>& factors) {
  const size_t num_tensors = call.tensors.size();
  if (!std::ranges::all_of(factors, [](double factor) { return std::isfinite(factor); })) {
    return;
  }
  if (num_tensors == 2) {
    rows.add_arithmetic_partials(kLinearOps);
  }
  for (size_t i = 0; i < num_tensors; ++i) {
    std::vector<Placement> inputs(num_tensors, replicate());
    inputs[i] = partial(PartialOp::kAvg);
    rows.add_arithmetic(partial(PartialOp::kAvg), inputs);
    // A single tensor is self, unless self is the number.
    const double factor = num_tensors == 1 && !has_tensor(call, "self") ? factors[1] : factors[i];
    for (const auto op : kOrderOps) {
      inputs[i] = partial(op);
      if (is_signed(call) && factor != 0) {
        rows.add_arithmetic(partial(factor > 0 ? op : reversed(op)), inputs);
      }
    }
  }
}

// Returns the factor alpha: 1 by default, and 0 for a complex number, which keeps no order.
double alpha_or_0(const OpCall& call) {
  const auto alpha = real_number(call, "alpha");
  return alpha ? *alpha : call.has_arg("alpha") ? 0.0 : 1.0;
}

void sum(const OpCall& call, RowList& rows) { weighted_sum(call, rows, {1.0, alpha_or_0(call)}); }
void difference(const OpCall& call, RowList& rows) { weighted_sum(call, rows, {1.0, -alpha_or_0(call)}); }
void reversed_difference(const OpCall& call, RowList& rows) {
  weighted_sum(call, rows, {-alpha_or_0(call), 1.0});
}

// Adds the rows of an operator that is linear in each of these arguments while the others are replicated.
void linear_in_each(const OpCall& call, RowList& rows, ArgumentNames arguments) {
  for (const auto name : arguments) {
    if (has_tensor(call, name)) {
      rows.add_arithmetic_partials(kLinearOps, {name});
    }
  }
}

void product(const OpCall& call, RowList& rows) {
  if (call.tensors.size() == 1) {
    scaled(call, rows, other_number(call));
  } else {
    add_one_partial(call, rows, kLinearOps);
  }
}

void quotient(const OpCall& call, RowList& rows) {
  if (call.has_arg("rounding_mode") && !call.arg("rounding_mode").is_none()) {
    return;
  }
  if (call.tensors.size() == 1) {
    const auto divisor = other_number(call);
    scaled(call, rows, divisor ? std::optional(1 / *divisor) : std::nullopt);
  } else {
    rows.add_arithmetic_partials(kLinearOps, {"self"});
  }
}

void linear_in_the_gradient(const OpCall& call, RowList& rows) {
  linear_in_each(call, rows, {"grad_output", "grad"});
}

// Returns the rows of log_sigmoid_backward(grad_output, self, buffer). On some devices the buffer is empty.
Rows log_sigmoid_backward(const OpCall& call) {
  RowList rows(call);
  const auto& self = call.tensor("self");
  for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
    const auto shard = any_shard(dim);
    const auto of_buffer = call.tensor("buffer").shape == self.shape ? shard : replicate();
    rows.add(shard, {{"grad_output", shard}, {"self", shard}, {"buffer", of_buffer}});
  }
  linear_in_the_gradient(call, rows);
  return rows.allowing_empty_shards();
}

void linear_in_self(const OpCall& call, RowList& rows) { linear_in_each(call, rows, {"self"}); }

void increasing_in_each(const OpCall& call, RowList& rows) { add_one_partial(call, rows, kOrderOps); }

PartialRows extreme(PartialOp op) {
  return [op](const OpCall& call, RowList& rows) {
    increasing_in_each(call, rows);
    if (call.tensors.size() == 2) {
      rows.add_arithmetic_partials({&op, 1});
    }
  };
}

// Adds the rows of x above the threshold, else `value`: increasing unless `value` is above the threshold.
void increasing_threshold(const OpCall& call, RowList& rows) {
  const auto threshold = real_number(call, "threshold");
  const auto value = real_number(call, "value");
  if (threshold && value && *value <= *threshold) {
    increasing(call, rows);
  }
}

// Adds the row of a function that decreases above 0 and is NaN elsewhere. The minimum of several numbers is
// above 0 only if all of them are.
void decreasing_above_0(const OpCall& call, RowList& rows) {
  rows.add_arithmetic(partial(PartialOp::kMax),
                      std::vector<Placement>(call.tensors.size(), partial(PartialOp::kMin)));
}

// Adds the rows of where(condition, self, other): all ranks take the same elements.
void choice(const OpCall& call, RowList& rows) {
  if (!has_tensor(call, "self") || !has_tensor(call, "other") ||
      call.tensor("self").dtype != call.tensor("other").dtype) {
    return;
  }
  rows.add_partials(kAllPartialOps, {"self", "other"});
}

// Returns true unless the argument is a number that is not finite.
bool may_be_finite(const OpCall& call, std::string_view name) {
  const auto number = real_number(call, name);
  return !number || std::isfinite(*number);
}

// Adds the rows of lerp(self, end, weight) and _foreach_lerp(self, tensors1, weight).
void interpolated(const OpCall& call, RowList& rows) {
  if (!may_be_finite(call, "weight")) {
    return;
  }
  rows.add_arithmetic_partials(kLinearOps, {"self", call.has_arg("end") ? "end" : "tensors1"});
}

// Adds the rows of self + value * tensor1 * tensor2.
void sum_with_product(const OpCall& call, RowList& rows) {
  if (!may_be_finite(call, "value")) {
    return;
  }
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), {{"self", partial(op)}, {"tensor1", partial(op)}});
    rows.add_arithmetic(partial(op), {{"self", partial(op)}, {"tensor2", partial(op)}});
  }
}

void sum_with_quotient(const OpCall& call, RowList& rows) {
  if (!may_be_finite(call, "value")) {
    return;
  }
  rows.add_arithmetic_partials(kLinearOps, {"self", "tensor1"});
}

}  // namespace
}  // namespace pointwise_rules

void add_broadcast_rows(const OpCall& call, RowList& rows) {
  const auto names = tensor_names(call);
  std::vector<size_t> operands;
  for (size_t i = 0; i < names.size(); ++i) {
    if (pointwise_rules::is_operand(names[i])) {
      operands.push_back(i);
    }
  }
  const auto shape = broadcast_shape(call, operands);
  for (int64_t dim = 0; dim < std::ssize(shape); ++dim) {
    std::vector<Placement> outputs;
    outputs.reserve(call.outputs.size());
    for (const auto& meta : call.outputs) {
      outputs.push_back(meta && meta->shape == shape ? any_shard(dim) : replicate());
    }
    std::vector<Placement> inputs(call.tensors.size(), replicate());
    for (const size_t operand : operands) {
      inputs[operand] = broadcast_shard(call.tensors[operand], dim, std::ssize(shape), shape[dim]);
    }
    rows.add(outputs, std::move(inputs));
  }
}

void add_filled_partials(const OpCall& call, RowList& rows) {
  rows.add_arithmetic_partials(kOpsKeepingConstants, {"self"});
  if (real_number(call, "value") == 0.0) {
    rows.add_arithmetic(partial(), {{"self", partial()}});
  }
}

Rule pointwise(PartialRows partial_rows) {
  return [partial_rows = std::move(partial_rows)](const OpCall& call) {
    RowList rows(call);
    add_broadcast_rows(call, rows);
    if (partial_rows) {
      partial_rows(call, rows);
    }
    return rows.allowing_empty_shards();
  };
}

namespace pointwise_rules {
namespace {

// Adds the operators without rows of partials.
void add_without_partials(RuleTable& table) {
  table.add_operators(
      {"aten::abs",   "aten::acos",        "aten::acosh",        "aten::angle",      "aten::asin",
       "aten::atan2", "aten::atanh",       "aten::complex",      "aten::copysign",   "aten::cos",
       "aten::cosh",  "aten::float_power", "aten::floor_divide", "aten::fmod",       "aten::frac",
       "aten::frexp", "aten::hypot",       "aten::ldexp",        "aten::log",        "aten::log10",
       "aten::log1p", "aten::log2",        "aten::logit",        "aten::nan_to_num", "aten::nextafter",
       "aten::polar", "aten::pow",         "aten::reciprocal",   "aten::remainder",  "aten::rsqrt",
       "aten::sin",   "aten::sinc",        "aten::sqrt",         "aten::square",     "aten::tan",
       "aten::xlogy"},
      pointwise());
  table.add_operators(
      {"aten::digamma", "aten::erfinv", "aten::i0", "aten::igamma", "aten::igammac", "aten::lgamma",
       "aten::mvlgamma", "aten::polygamma", "aten::special_entr", "aten::special_i0e", "aten::special_i1",
       "aten::special_i1e", "aten::special_log_ndtr", "aten::special_ndtri", "aten::special_zeta"},
      pointwise());
  table.add_operators(
      {"aten::special_airy_ai", "aten::special_bessel_j0", "aten::special_bessel_j1",
       "aten::special_bessel_y0", "aten::special_bessel_y1", "aten::special_modified_bessel_i0",
       "aten::special_spherical_bessel_j0", "prims::bessel_i0e", "prims::bessel_i1", "prims::bessel_i1e",
       "prims::bessel_j0", "prims::bessel_j1", "prims::spherical_bessel_j0"},
      pointwise());
  table.add_operators(
      {"aten::special_chebyshev_polynomial_t", "aten::special_chebyshev_polynomial_u",
       "aten::special_chebyshev_polynomial_v", "aten::special_chebyshev_polynomial_w",
       "aten::special_hermite_polynomial_h", "aten::special_hermite_polynomial_he",
       "aten::special_laguerre_polynomial_l", "aten::special_legendre_polynomial_p",
       "aten::special_shifted_chebyshev_polynomial_t", "aten::special_shifted_chebyshev_polynomial_u",
       "aten::special_shifted_chebyshev_polynomial_v", "aten::special_shifted_chebyshev_polynomial_w"},
      pointwise());
  table.add_operators({"aten::_prelu_kernel", "aten::celu", "aten::elu", "aten::gelu", "aten::hardswish",
                       "aten::hardtanh", "aten::leaky_relu", "aten::log_sigmoid_forward", "aten::mish",
                       "aten::selu", "aten::silu", "aten::softplus", "aten::softshrink"},
                      pointwise());
  table.add_operators({"aten::rrelu_with_noise", "aten::rrelu_with_noise_functional"}, pointwise());
  table.add_operators(
      {"aten::eq", "aten::ge", "aten::gt", "aten::heaviside", "aten::isfinite", "aten::isinf", "aten::isnan",
       "aten::isneginf", "aten::isposinf", "aten::le", "aten::lt", "aten::ne", "aten::signbit"},
      pointwise());
  table.add_operators(
      {"aten::__and__",     "aten::__iand__",   "aten::__ilshift__",         "aten::__ior__",
       "aten::__irshift__", "aten::__ixor__",   "aten::__lshift__",          "aten::__or__",
       "aten::__rshift__",  "aten::__xor__",    "aten::bitwise_and",         "aten::bitwise_left_shift",
       "aten::bitwise_not", "aten::bitwise_or", "aten::bitwise_right_shift", "aten::bitwise_xor",
       "aten::gcd",         "aten::lcm",        "aten::logical_and",         "aten::logical_not",
       "aten::logical_or",  "aten::logical_xor"},
      pointwise());
  table.add_operators(
      {"prims::abs",       "prims::bitwise_not", "prims::digamma", "prims::div",   "prims::erfcx",
       "prims::exp2",      "prims::fma",         "prims::frexp",   "prims::gcd",   "prims::hypot",
       "prims::igamma",    "prims::igammac",     "prims::log2",    "prims::ndtri", "prims::ne",
       "prims::nextafter", "prims::reciprocal",  "prims::rsqrt",   "prims::sign",  "prims::signbit",
       "prims::trunc",     "prims::zeta"},
      pointwise());
}

}  // namespace

void add(RuleTable& table) {
  add_without_partials(table);
  table.add_operators({"aten::_conj", "aten::conj_physical", "prims::conj_physical"}, pointwise(linear));
  table.add_operators(
      {"aten::asinh",   "aten::atan",       "aten::ceil",        "aten::deg2rad",
       "aten::erf",     "aten::exp",        "aten::exp2",        "aten::expm1",
       "aten::floor",   "aten::hardshrink", "aten::hardsigmoid", "aten::rad2deg",
       "aten::relu",    "aten::relu6",      "aten::round",       "aten::sgn",
       "aten::sigmoid", "aten::sign",       "aten::sinh",        "aten::special_modified_bessel_i1",
       "aten::tanh",    "aten::trunc"},
      pointwise(increasing));
  table.add_operators({"aten::erfc", "aten::special_erfcx"}, pointwise(decreasing));
  table.add_operators({"aten::special_modified_bessel_k0", "aten::special_modified_bessel_k1",
                       "aten::special_scaled_modified_bessel_k0", "aten::special_scaled_modified_bessel_k1"},
                      pointwise(decreasing_above_0));
  table.add_operators({"aten::threshold"}, pointwise(increasing_threshold));
  table.add_operators({"aten::neg"}, pointwise(negated));
  table.add_operators({"aten::add"}, pointwise(sum));
  table.add_operators({"aten::sub"}, pointwise(difference));
  table.add_operators({"aten::rsub"}, pointwise(reversed_difference));
  table.add_operators({"aten::mul"}, pointwise(product));
  table.add_operators({"aten::div", "aten::true_divide"}, pointwise(quotient));
  table.add_operators({"aten::special_xlog1py"}, pointwise(linear_in_self));
  table.add_operators({"aten::lerp"}, pointwise(interpolated));
  table.add_operators({"aten::addcmul"}, pointwise(sum_with_product));
  table.add_operators({"aten::addcdiv"}, pointwise(sum_with_quotient));
  table.add_operators({"aten::logaddexp", "aten::logaddexp2", "aten::clamp", "aten::clip"},
                      pointwise(increasing_in_each));
  table.add_operators({"aten::maximum", "aten::fmax", "aten::clamp_min", "prims::fmax", "prims::maximum"},
                      pointwise(extreme(PartialOp::kMax)));
  table.add_overloads({"aten::max.other", "aten::max.out"}, pointwise(extreme(PartialOp::kMax)));
  table.add_operators({"aten::minimum", "aten::fmin", "aten::clamp_max", "prims::fmin", "prims::minimum"},
                      pointwise(extreme(PartialOp::kMin)));
  table.add_overloads({"aten::min.other", "aten::min.out"}, pointwise(extreme(PartialOp::kMin)));
  table.add_operators({"aten::_prelu_kernel_backward", "aten::elu_backward", "aten::gelu_backward",
                       "aten::hardshrink_backward", "aten::hardsigmoid_backward", "aten::hardswish_backward",
                       "aten::hardtanh_backward", "aten::leaky_relu_backward", "aten::logit_backward",
                       "aten::mish_backward", "aten::native_dropout_backward", "aten::sigmoid_backward",
                       "aten::silu_backward", "aten::softplus_backward", "aten::softshrink_backward",
                       "aten::tanh_backward", "aten::threshold_backward"},
                      pointwise(linear_in_the_gradient));
  table.add_operators({"aten::log_sigmoid_backward"}, log_sigmoid_backward);
  table.add_overloads({"aten::where.self", "aten::where.self_out"}, pointwise(choice));
  table.add_operators({"aten::masked_fill", "aten::fill"}, pointwise(add_filled_partials));
}

}  // namespace pointwise_rules
}  // namespace funcol
