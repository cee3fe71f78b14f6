// reduce: an all_reduce whose result only the destination keeps. PyTorch has no functional operator that
// reduces to one rank, and what a rank sends must not depend on whether a layer watches it.
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/gradient.h"
#include "ops/meta.h"

namespace funcol {
namespace reduce {
namespace {

using c10::IValue;
using Tensors = std::vector<at::Tensor>;

constexpr auto kOp = "reduce";

at::Tensor meta(const at::Tensor& input, const IValue& reduce_op, int64_t destination, const IValue& group) {
  reduce_op_from_ivalue(reduce_op, kOp);
  check_rank(destination, *group_from_ivalue(group, kOp), "dst", kOp);
  return meta_like(input);
}

at::Tensor traced(const at::Tensor& input, const IValue& reduce_op, int64_t destination,
                  const IValue& group) {
  const auto resolved = group_from_ivalue(group, kOp);
  check_rank(destination, *resolved, "dst", kOp);
  reduce_op_from_ivalue(reduce_op, kOp);
  const auto reduced = call::all_reduce.traced(input, reduce_op, group);
  return resolved->getRank() == destination ? reduced : at::zeros_like(reduced);
}

Tensors rule(const Tensors& gradients, const autograd::Values& values, const autograd::Data& data) {
  const auto& reduce_op = data[0];
  const auto& group = data[2];
  const auto sent = [&](const at::Tensor& tensor) { return call::broadcast(tensor, data[1].toInt(), group); };
  auto total = sent(autograd::weighted(gradients[0], reduce_op, group, kOp));
  auto results = values.outputs;
  std::ranges::transform(results, results.begin(), sent);
  return autograd::reduction_gradients({std::move(total)}, values.inputs, results, reduce_op, group, kOp);
}

}  // namespace
}  // namespace reduce

StartedCollective start_reduce(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t destination,
                               const GroupPtr& group) {
  const BelowAutograd below_autograd;
  check_dense(input, reduce::kOp);
  check_rank(destination, *group, "dst", reduce::kOp);
  check_reduction(input, reduce_op, *group, reduce::kOp);
  agree_if_checked(*group, reduce::kOp, input, reduce_op_name(reduce_op), ", dst=", destination);
  settle(input);
  auto reduced = at::clone(input, at::MemoryFormat::Contiguous);
  std::vector<at::Tensor> wires{wire_for_reduction(reduced)};
  c10d::AllreduceOptions options;
  options.reduceOp = op_for_reduction(reduce_op, input.scalar_type());
  auto work = on_backend(*group, input.device().type(),
                         [&](auto& target) { return target.allreduce(wires, options); });
  auto out = group->getRank() == destination ? reduced : at::zeros(input.sizes(), input.options());
  return {reduce::kOp, group, std::move(work), as_list(std::move(reduced)), as_list(std::move(out)), {}};
}

const decltype(call::reduce) call::reduce(
    {.name = "reduce"}, start_reduce,
    {.meta = reduce::meta, .traced = reduce::traced, .rule = reduce::rule, .saves_reduce_op = true});

}  // namespace funcol
