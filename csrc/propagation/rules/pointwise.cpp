#include "propagation/rules/pointwise.h"

#include <algorithm>

#include "propagation/rules/families.h"

namespace funcol {
namespace {

bool is_operand(std::string_view name) {
  constexpr std::array<std::string_view, 6> kNoOperands{"scalars",    "lr",        "state_steps",
                                                        "grad_scale", "found_inf", "inv_scale"};
  return std::ranges::find(kNoOperands, name) == kNoOperands.end();
}

// The size of dim `dim` of a tensor that is broadcast to `num_dims` dims; 1 where it has no such dim.
int64_t broadcast_size(const TensorMeta& meta, int64_t dim, int64_t num_dims) {
  const int64_t own = dim - (num_dims - meta.num_dims());
  return own < 0 ? 1 : meta.shape[own];
}

// Where the tensor's row entry is for a shard of dim `dim` of the broadcast shape.
Placement broadcast_shard(const TensorMeta& meta, int64_t dim, const std::vector<int64_t>& shape) {
  const auto num_dims = static_cast<int64_t>(shape.size());
  const int64_t own = dim - (num_dims - meta.num_dims());
  return own >= 0 && meta.shape[own] == shape[dim] ? any_shard(own) : replicate();
}

void linear(const OpCall& call, RowList& rows) {
  for (const auto op : kLinearOps) {
    if (call.tensors.size() == 1) {
      rows.add_arithmetic(partial(op), {partial(op)});
    }
  }
}

void increasing(const OpCall& call, RowList& rows) {
  for (const auto op : kOrderOps) {
    if (call.tensors.size() == 1) {
      rows.add_arithmetic(partial(op), {partial(op)});
    }
  }
}

PartialOp reversed(PartialOp op) { return op == PartialOp::kMax ? PartialOp::kMin : PartialOp::kMax; }

void decreasing(const OpCall& call, RowList& rows) {
  for (const auto op : kOrderOps) {
    if (call.tensors.size() == 1) {
      rows.add_arithmetic(partial(reversed(op)), {partial(op)});
    }
  }
}

bool is_signed(const OpCall& call) {
  return std::ranges::none_of(call.tensors, [](const auto& meta) { return is_unsigned(meta.dtype); });
}

// Times a factor of this sign, if it is known.
void scaled(const OpCall& call, RowList& rows, std::optional<double> factor) {
  linear(call, rows);
  if (factor && *factor > 0) {
    increasing(call, rows);
  } else if (factor && *factor < 0 && is_signed(call)) {
    decreasing(call, rows);
  }
}

void negated(const OpCall& call, RowList& rows) { scaled(call, rows, -1.0); }

// The number that the operator takes beside its tensor, whatever it is called.
std::optional<double> other_number(const OpCall& call) {
  const auto other = real_number(call, "other");
  return other ? other : real_number(call, "scalar");
}

// factors[0] * self + factors[1] * other, one of which may be a number. What is constant on all ranks shifts
// averages and extremes as it shifts their elements, but would be summed once a rank.
void weighted_sum(const OpCall& call, RowList& rows, const std::vector<double>& factors) {
  const size_t num_tensors = call.tensors.size();
  if (num_tensors == 2) {
    for (const auto op : kLinearOps) {
      rows.add_arithmetic(partial(op), {partial(op), partial(op)});
    }
  }
  for (size_t i = 0; i < num_tensors; ++i) {
    std::vector<Placement> inputs(num_tensors, replicate());
    inputs[i] = partial(PartialOp::kAvg);
    rows.add_arithmetic(partial(PartialOp::kAvg), inputs);
    // A lone tensor is self, unless self is the number.
    const double factor = num_tensors == 1 && !has_tensor(call, "self") ? factors[1] : factors[i];
    for (const auto op : kOrderOps) {
      inputs[i] = partial(op);
      if (is_signed(call) && factor != 0) {
        rows.add_arithmetic(partial(factor > 0 ? op : reversed(op)), inputs);
      }
    }
  }
}

// Unknown factors (complex ones) have no order to keep.
double factor_or_none(const OpCall& call) {
  const auto alpha = real_number(call, "alpha");
  return alpha ? *alpha : call.has_arg("alpha") ? 0.0 : 1.0;
}

void sum(const OpCall& call, RowList& rows) { weighted_sum(call, rows, {1.0, factor_or_none(call)}); }
void difference(const OpCall& call, RowList& rows) { weighted_sum(call, rows, {1.0, -factor_or_none(call)}); }
void reversed_difference(const OpCall& call, RowList& rows) {
  weighted_sum(call, rows, {-factor_or_none(call), 1.0});
}

// Linear in each of the arguments `linear_in` while the others stay.
void linear_in_each(const OpCall& call, RowList& rows, std::initializer_list<std::string_view> linear_in) {
  for (const auto name : linear_in) {
    for (const auto op : kLinearOps) {
      if (has_tensor(call, name)) {
        rows.add_arithmetic(partial(op), inputs_by_name(call, {{name, partial(op)}}));
      }
    }
  }
}

void product(const OpCall& call, RowList& rows) {
  if (call.tensors.size() == 1) {
    scaled(call, rows, other_number(call));
    return;
  }
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), {partial(op), replicate()});
    rows.add_arithmetic(partial(op), {replicate(), partial(op)});
  }
}

void quotient(const OpCall& call, RowList& rows) {
  if (call.has_arg("rounding_mode") && !call.arg("rounding_mode").is_none()) {
    return;
  }
  if (call.tensors.size() == 1) {
    scaled(call, rows, other_number(call));
    return;
  }
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), {partial(op), replicate()});
  }
}

void linear_in_the_gradient(const OpCall& call, RowList& rows) {
  linear_in_each(call, rows, {"grad_output", "grad"});
}

void linear_in_self(const OpCall& call, RowList& rows) { linear_in_each(call, rows, {"self"}); }

// Increasing in each argument: an extreme of one, the others as they are.
void increasing_in_each(const OpCall& call, RowList& rows) {
  for (const auto op : kOrderOps) {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      std::vector<Placement> inputs(call.tensors.size(), replicate());
      inputs[i] = partial(op);
      rows.add_arithmetic(partial(op), inputs);
    }
  }
}

PartialRows extreme(PartialOp op) {
  return [op](const OpCall& call, RowList& rows) {
    increasing_in_each(call, rows);
    if (call.tensors.size() == 2) {
      rows.add_arithmetic(partial(op), {partial(op), partial(op)});
    }
  };
}

// x where it exceeds the threshold, else a value: increasing unless the value is above the threshold.
void increasing_threshold(const OpCall& call, RowList& rows) {
  const auto threshold = real_number(call, "threshold");
  const auto value = real_number(call, "value");
  if (threshold && value && *value <= *threshold) {
    increasing(call, rows);
  }
}

// Smaller numbers, NaN from 0 downwards: extremes of what lies above 0 stay there, minima alone.
void decreasing_above_0(const OpCall& call, RowList& rows) {
  rows.add_arithmetic(partial(PartialOp::kMax),
                      std::vector<Placement>(call.tensors.size(), partial(PartialOp::kMin)));
}

// Elements of one or the other operand, the same on each rank.
void choice(const OpCall& call, RowList& rows) {
  if (!has_tensor(call, "self") || !has_tensor(call, "other") ||
      call.tensor("self").dtype != call.tensor("other").dtype) {
    return;
  }
  for (const auto op : kAllPartialOps) {
    rows.add(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"other", partial(op)}}));
  }
}

// A value put in place of elements: once reduced it is still the value for averages and extremes.
void filled(const OpCall& call, RowList& rows) {
  for (const auto op : {PartialOp::kAvg, PartialOp::kMax, PartialOp::kMin}) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}}));
  }
  if (real_number(call, "value") == 0.0) {
    rows.add_arithmetic(partial(), inputs_by_name(call, {{"self", partial()}}));
  }
}

void interpolated(const OpCall& call, RowList& rows) {
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"end", partial(op)}}));
  }
}

// self + value * tensor1 (* or /) tensor2
void sum_with_product(const OpCall& call, RowList& rows) {
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"tensor1", partial(op)}}));
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"tensor2", partial(op)}}));
  }
}

void sum_with_quotient(const OpCall& call, RowList& rows) {
  for (const auto op : kLinearOps) {
    rows.add_arithmetic(partial(op), inputs_by_name(call, {{"self", partial(op)}, {"tensor1", partial(op)}}));
  }
}

}  // namespace

void add_broadcast_rows(const OpCall& call, RowList& rows) {
  const auto names = tensor_names(call);
  int64_t num_dims = 0;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    num_dims = std::max(num_dims, is_operand(names[i]) ? call.tensors[i].num_dims() : 0);
  }
  std::vector<int64_t> shape(num_dims, 1);
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const int64_t size = is_operand(names[i]) ? broadcast_size(call.tensors[i], dim, num_dims) : 1;
      shape[dim] = size == 1 ? shape[dim] : size;
    }
  }
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    std::vector<Placement> outputs;
    outputs.reserve(call.outputs.size());
    for (const auto& meta : call.outputs) {
      outputs.push_back(meta && meta->shape == shape ? any_shard(dim) : replicate());
    }
    std::vector<Placement> inputs;
    inputs.reserve(call.tensors.size());
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      inputs.push_back(is_operand(names[i]) ? broadcast_shard(call.tensors[i], dim, shape) : replicate());
    }
    rows.add(outputs, std::move(inputs));
  }
}

Rule pointwise(PartialRows partial_rows) {
  return [partial_rows = std::move(partial_rows)](const OpCall& call) {
    RowList rows(call);
    add_broadcast_rows(call, rows);
    if (partial_rows) {
      partial_rows(call, rows);
    }
    return Rows{.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
  };
}

void add_pointwise_rules(RuleTable& table) {
  table.add_all_overloads({"aten::__ilshift__",
                           "aten::__irshift__",
                           "aten::__ixor__",
                           "aten::__iand__",
                           "aten::__ior__",
                           "aten::__lshift__",
                           "aten::__rshift__",
                           "aten::__xor__",
                           "aten::__and__",
                           "aten::__or__",
                           "aten::_prelu_kernel",
                           "aten::abs",
                           "aten::acos",
                           "aten::acosh",
                           "aten::angle",
                           "aten::asin",
                           "aten::atan2",
                           "aten::atanh",
                           "aten::bitwise_and",
                           "aten::bitwise_left_shift",
                           "aten::bitwise_not",
                           "aten::bitwise_or",
                           "aten::bitwise_right_shift",
                           "aten::bitwise_xor",
                           "aten::complex",
                           "aten::copysign",
                           "aten::cos",
                           "aten::cosh",
                           "aten::digamma",
                           "aten::eq",
                           "aten::erfinv",
                           "aten::float_power",
                           "aten::floor_divide",
                           "aten::fmod",
                           "aten::frac",
                           "aten::frexp",
                           "aten::gcd",
                           "aten::ge",
                           "aten::gelu",
                           "aten::gt",
                           "aten::hardswish",
                           "aten::heaviside",
                           "aten::hypot",
                           "aten::i0",
                           "aten::igamma",
                           "aten::igammac",
                           "aten::isfinite",
                           "aten::isinf",
                           "aten::isnan",
                           "aten::isneginf",
                           "aten::isposinf",
                           "aten::lcm",
                           "aten::ldexp",
                           "aten::le",
                           "aten::lgamma",
                           "aten::log",
                           "aten::log10",
                           "aten::log1p",
                           "aten::log2",
                           "aten::logical_and",
                           "aten::logical_not",
                           "aten::logical_or",
                           "aten::logical_xor",
                           "aten::logit",
                           "aten::lt",
                           "aten::mish",
                           "aten::mvlgamma",
                           "aten::nan_to_num",
                           "aten::ne",
                           "aten::nextafter",
                           "aten::polar",
                           "aten::polygamma",
                           "aten::pow",
                           "aten::reciprocal",
                           "aten::remainder",
                           "aten::rrelu_with_noise",
                           "aten::rrelu_with_noise_functional",
                           "aten::rsqrt",
                           "aten::signbit",
                           "aten::silu",
                           "aten::sin",
                           "aten::sinc",
                           "aten::special_airy_ai",
                           "aten::special_bessel_j0",
                           "aten::special_bessel_j1",
                           "aten::special_bessel_y0",
                           "aten::special_bessel_y1",
                           "aten::special_chebyshev_polynomial_t",
                           "aten::special_chebyshev_polynomial_u",
                           "aten::special_chebyshev_polynomial_v",
                           "aten::special_chebyshev_polynomial_w",
                           "aten::special_entr",
                           "aten::special_hermite_polynomial_h",
                           "aten::special_hermite_polynomial_he",
                           "aten::special_i0e",
                           "aten::special_i1",
                           "aten::special_i1e",
                           "aten::special_laguerre_polynomial_l",
                           "aten::special_legendre_polynomial_p",
                           "aten::special_log_ndtr",
                           "aten::special_modified_bessel_i0",
                           "aten::special_ndtri",
                           "aten::special_shifted_chebyshev_polynomial_t",
                           "aten::special_shifted_chebyshev_polynomial_u",
                           "aten::special_shifted_chebyshev_polynomial_v",
                           "aten::special_shifted_chebyshev_polynomial_w",
                           "aten::special_spherical_bessel_j0",
                           "aten::special_zeta",
                           "aten::sqrt",
                           "aten::square",
                           "aten::tan",
                           "aten::xlogy",
                           "prims::abs",
                           "prims::bessel_i0e",
                           "prims::bessel_i1",
                           "prims::bessel_i1e",
                           "prims::bessel_j0",
                           "prims::bessel_j1",
                           "prims::bitwise_not",
                           "prims::digamma",
                           "prims::div",
                           "prims::erfcx",
                           "prims::exp2",
                           "prims::fma",
                           "prims::frexp",
                           "prims::gcd",
                           "prims::hypot",
                           "prims::igamma",
                           "prims::igammac",
                           "prims::log2",
                           "prims::ndtri",
                           "prims::ne",
                           "prims::nextafter",
                           "prims::reciprocal",
                           "prims::rsqrt",
                           "prims::sign",
                           "prims::signbit",
                           "prims::spherical_bessel_j0",
                           "prims::trunc",
                           "prims::zeta"},
                          pointwise());
  table.add_all_overloads({"aten::_conj", "aten::conj_physical", "prims::conj_physical"}, pointwise(linear));
  table.add_all_overloads(
      {"aten::asinh",   "aten::atan",       "aten::ceil",        "aten::deg2rad",
       "aten::erf",     "aten::exp",        "aten::exp2",        "aten::expm1",
       "aten::floor",   "aten::hardshrink", "aten::hardsigmoid", "aten::rad2deg",
       "aten::relu",    "aten::relu6",      "aten::round",       "aten::sgn",
       "aten::sigmoid", "aten::sign",       "aten::sinh",        "aten::special_modified_bessel_i1",
       "aten::tanh",    "aten::trunc"},
      pointwise(increasing));
  table.add_all_overloads({"aten::erfc", "aten::special_erfcx"}, pointwise(decreasing));
  table.add_all_overloads(
      {"aten::special_modified_bessel_k0", "aten::special_modified_bessel_k1",
       "aten::special_scaled_modified_bessel_k0", "aten::special_scaled_modified_bessel_k1"},
      pointwise(decreasing_above_0));
  table.add_all_overloads({"aten::celu", "aten::elu", "aten::hardtanh", "aten::leaky_relu", "aten::selu",
                           "aten::softplus", "aten::softshrink"},
                          pointwise());
  table.add_all_overloads({"aten::threshold"}, pointwise(increasing_threshold));
  table.add_all_overloads({"aten::neg"}, pointwise(negated));
  table.add_all_overloads({"aten::add"}, pointwise(sum));
  table.add_all_overloads({"aten::sub"}, pointwise(difference));
  table.add_all_overloads({"aten::rsub"}, pointwise(reversed_difference));
  table.add_all_overloads({"aten::mul"}, pointwise(product));
  table.add_all_overloads({"aten::div", "aten::true_divide"}, pointwise(quotient));
  table.add_all_overloads({"aten::special_xlog1py"}, pointwise(linear_in_self));
  table.add_all_overloads({"aten::lerp"}, pointwise(interpolated));
  table.add_all_overloads({"aten::addcmul"}, pointwise(sum_with_product));
  table.add_all_overloads({"aten::addcdiv"}, pointwise(sum_with_quotient));
  table.add_all_overloads({"aten::logaddexp", "aten::logaddexp2", "aten::clamp", "aten::clip"},
                          pointwise(increasing_in_each));
  table.add_all_overloads({"aten::maximum", "aten::fmax", "aten::clamp_min", "prims::fmax", "prims::maximum"},
                          pointwise(extreme(PartialOp::kMax)));
  table.add_overloads({"aten::max.other", "aten::max.out"}, pointwise(extreme(PartialOp::kMax)));
  table.add_all_overloads({"aten::minimum", "aten::fmin", "aten::clamp_max", "prims::fmin", "prims::minimum"},
                          pointwise(extreme(PartialOp::kMin)));
  table.add_overloads({"aten::min.other", "aten::min.out"}, pointwise(extreme(PartialOp::kMin)));
  table.add_all_overloads(
      {"aten::elu_backward", "aten::gelu_backward", "aten::hardshrink_backward", "aten::hardsigmoid_backward",
       "aten::hardswish_backward", "aten::hardtanh_backward", "aten::leaky_relu_backward",
       "aten::logit_backward", "aten::mish_backward", "aten::native_dropout_backward",
       "aten::sigmoid_backward", "aten::silu_backward", "aten::softplus_backward",
       "aten::softshrink_backward", "aten::tanh_backward", "aten::threshold_backward"},
      pointwise(linear_in_the_gradient));
  table.add_overloads({"aten::where.self", "aten::where.self_out"}, pointwise(choice));
  table.add_all_overloads({"aten::masked_fill", "aten::fill"}, pointwise(filled));
}

}  // namespace funcol
