#include "ops/reduction_rules.h"

#include <ATen/ops/index_fill.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "comm/process_group.h"
#include "ops/calls.h"

namespace funcol::autograd {
namespace {

using Kind = c10d::ReduceOp::RedOpType;

at::Tensor scaled_by_factor(const at::Tensor& total, const c10d::ReduceOp& reduce_op) {
  const auto& supplement = static_cast<const c10d::NCCLPreMulSumSupplement&>(*reduce_op.supplement_);
  return supplement.tensor_factor.defined() ? total * supplement.tensor_factor.to(total.dtype())
                                            : total * supplement.double_factor;
}

// The number of ranks that hold the extremum is summed in float, which holds it exactly in any case.
at::Tensor routed_to_extremum(const at::Tensor& total, const at::Tensor& input, const at::Tensor& result,
                              const IValue& group) {
  const auto holds = (input == result).logical_or(at::isnan(input).logical_and(at::isnan(result)));
  const auto num_holders = call::all_reduce(holds.to(at::kFloat), "sum", group);
  const auto share = (total / num_holders).to(total.scalar_type());
  return at::where(holds, share, at::zeros({}, share.options()));
}

// Gathers all factors rather than divide by this rank's own, which may be zero, and so that it can be
// differentiated again.
at::Tensor times_other_factors(const at::Tensor& total, const at::Tensor& input, const IValue& group,
                               const char* op) {
  const auto rank = group_from_ivalue(group, op)->getRank();
  const auto factors = call::all_gather_along_dim(input.unsqueeze(0), 0, group, {});
  const auto own = at::scalar_tensor(rank, input.options().dtype(at::kLong));
  return total * at::index_fill(factors, 0, own, 1).prod(0);
}

}  // namespace

IValue totalling_op(const IValue& reduce_op, const char* op) {
  return reduce_op_from_ivalue(reduce_op, op).op_ == Kind::AVG ? "avg" : "sum";
}

at::Tensor weighted(const at::Tensor& gradient, const IValue& reduce_op, const IValue& group,
                    const char* op) {
  const bool is_mean = reduce_op_from_ivalue(reduce_op, op).op_ == Kind::AVG;
  return is_mean ? gradient / group_from_ivalue(group, op)->getSize() : gradient;
}

bool depends_on_values(const c10d::ReduceOp& reduce_op) {
  const Kind kind = reduce_op.op_;
  return kind == Kind::MIN || kind == Kind::MAX || kind == Kind::PRODUCT;
}

bool depends_on_values(const IValue& reduce_op, const char* op) {
  return depends_on_values(reduce_op_from_ivalue(reduce_op, op));
}

at::Tensor reduction_gradient(const at::Tensor& total, const at::Tensor& input, const at::Tensor& result,
                              const IValue& reduce_op, const IValue& group, const char* op) {
  const auto resolved = reduce_op_from_ivalue(reduce_op, op);
  switch (resolved.op_) {
    case Kind::SUM:
    case Kind::AVG:
      return total;
    case Kind::PREMUL_SUM:
      return scaled_by_factor(total, resolved);
    case Kind::MIN:
    case Kind::MAX:
      return routed_to_extremum(total, input, result, group);
    case Kind::PRODUCT:
      return times_other_factors(total, input, group, op);
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "funcol::", op, ": reduce op '", reduce_op_name(resolved),
                                  "' has no gradient. Detach the input, or use a reduce op that has one.");
  }
}

Tensors reduction_gradients(Tensors totals, const Tensors& inputs, const Tensors& results,
                            const IValue& reduce_op, const IValue& group, const char* op) {
  for (size_t i = 0; i < totals.size(); ++i) {
    totals[i] = inputs.empty() ? reduction_gradient(totals[i], {}, {}, reduce_op, group, op)
                               : reduction_gradient(totals[i], inputs[i], results[i], reduce_op, group, op);
  }
  return totals;
}

}  // namespace funcol::autograd
