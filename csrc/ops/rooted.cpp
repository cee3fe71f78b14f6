// Collectives with a root other than broadcast: reduce, scatter, gather.
//
// Scatter and gather are exchanges in which only the root sends, or only the root receives: backends then
// move what a scatter or gather of their own would, and parts may differ in size.
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "ops/collectives.h"
#include "ops/exchange.h"
#include "ops/kinds.h"
#include "ops/parts.h"
#include "ops/wire.h"

namespace funcol {
namespace {

// All that goes to or comes from rank `root`, and nothing else.
std::vector<int64_t> only(int64_t root, int64_t numel, const c10d::ProcessGroup& group) {
  std::vector<int64_t> splits(group.getSize(), 0);
  splits[root] = numel;
  return splits;
}

}  // namespace

Start start_reduce(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t destination,
                   const GroupPtr& group) {
  constexpr auto kOp = "reduce";
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_rank(destination, *group, "dst", kOp);
  check_reduction(input, reduce_op, *group, kOp);
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str(reduce_op_name(reduce_op), ", dst=", destination), describe_tensors(input));
  }
  settle(input);
  auto reduced = at::clone(input, at::MemoryFormat::Contiguous);
  std::vector<at::Tensor> wires{wire_for_reduction(reduced)};
  c10d::ReduceOptions options;
  options.reduceOp = op_for_reduction(reduce_op, input.scalar_type());
  options.rootRank = destination;
  auto work =
      on_backend(*group, input.device().type(), [&](auto& target) { return target.reduce(wires, options); });
  auto out = group->getRank() == destination ? reduced : at::zeros(input.sizes(), input.options());
  return {kOp, group, std::move(work), as_list(std::move(reduced)), as_list(std::move(out)), {}};
}

Start start_scatter(const at::Tensor& input, int64_t source, int64_t dim, at::OptionalIntArrayRef split_sizes,
                    const GroupPtr& group) {
  constexpr auto kOp = "scatter";
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_has_dims(input, kOp);
  check_rank(source, *group, "src", kOp);
  const auto parts = Parts::of_whole(input.sizes(), wrap_dim(dim, input, kOp), split_sizes, *group, kOp);
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str("src=", source, ", dim=", parts.dim(), ", sizes=", parts.sizes()),
          describe_tensors(input));
  }
  const auto rank = group->getRank();
  const bool sends = rank == source;
  if (sends) {
    settle(input);
  }
  auto sent = sends ? parts.pack(input) : fresh_tensor(0, input);
  auto out = fresh_tensor(parts.shape(rank), input);
  auto work = exchange(sent, out.view(-1), only(source, parts.numel(rank), *group),
                       sends ? parts.numels() : only(source, 0, *group), *group);
  return {kOp, group, std::move(work), as_list(std::move(sent)), as_list(std::move(out)), {}};
}

Start start_gather(const at::Tensor& input, int64_t destination, int64_t dim,
                   at::OptionalIntArrayRef split_sizes, const GroupPtr& group) {
  constexpr auto kOp = "gather";
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_has_dims(input, kOp);
  check_rank(destination, *group, "dst", kOp);
  const auto parts = Parts::of_shard(input.sizes(), wrap_dim(dim, input, kOp), split_sizes, *group, kOp);
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str("dst=", destination, ", dim=", parts.dim(), ", sizes=", parts.sizes()),
          describe_tensors(input, parts.dim()));
  }
  const bool receives = group->getRank() == destination;
  auto sent = private_input(input).view(-1);
  const auto received = fresh_tensor(receives ? parts.whole_numel() : 0, input);
  auto work = exchange(sent, received, receives ? parts.numels() : only(destination, 0, *group),
                       only(destination, sent.numel(), *group), *group);
  auto shape = parts.whole_shape();
  if (!receives) {
    shape[parts.dim()] = 0;
  }
  if (!receives || parts.lie_in_order()) {
    const bool has_result = receives;  // nobody misses the others
    return {kOp, group, std::move(work), as_list(std::move(sent)), {received.view(shape)}, {}, has_result};
  }
  const auto out = fresh_tensor(shape, input);
  const auto unpack = [parts](const Start& start) { parts.unpack(start.buffers[1], 0, start.outputs[0]); };
  return {kOp, group, std::move(work), {std::move(sent), received}, {out}, unpack};
}

}  // namespace funcol
