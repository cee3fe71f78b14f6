// Gathers and scatters of parts that differ in size from rank to rank.
//
// Backends gather and reduce equal parts, so each part travels padded to the largest one; the padding is
// left out by the pass that puts the parts into place.
#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "compat/process_group.h"
#include "ops/collectives.h"
#include "ops/epilogue.h"
#include "ops/parts.h"
#include "ops/wire.h"

namespace funcol {

Start start_uneven_all_gather(const at::Tensor& input, int64_t dim, at::OptionalIntArrayRef split_sizes,
                              const GroupPtr& group) {
  constexpr auto kOp = "all_gather_tensor";
  if (!split_sizes.has_value()) {
    return start_all_gather(input, dim, group);
  }
  const BelowAutograd below_autograd;
  check_has_dims(input, kOp);
  const auto parts = Parts::of_shard(input.sizes(), wrap_dim(dim, input, kOp), split_sizes, *group, kOp);
  if (parts.are_equal()) {
    return start_all_gather(input, dim, group);
  }
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str("dim=", parts.dim(), ", split_sizes=", *split_sizes),
          describe_tensors(input, parts.dim()));
  }
  auto source = contiguous_input(input).view(-1);
  const auto stride = parts.max_numel();
  if (source.numel() < stride) {
    const auto padded = at::zeros(stride, input.options());
    padded.narrow(0, 0, source.numel()).copy_(source);
    source = padded;
  }
  const auto gathered = fresh_tensor(parts.num_parts() * stride, input);
  auto wire_in = wire_for_movement(source, *group);
  auto wire_out = wire_for_movement(gathered, *group);
  auto work = on_backend(*group, input.device().type(), [&](auto& target) {
    return compat::all_gather_flat(target, wire_out, wire_in, {});
  });
  const auto out = fresh_tensor(parts.whole_shape(), input);
  return {kOp, group, std::move(work), {std::move(source), gathered}, {out}, as_epilogue([=] {
            parts.unpack(gathered, stride, out);
          })};
}

Start start_uneven_reduce_scatter(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t dim,
                                  at::OptionalIntArrayRef split_sizes, const GroupPtr& group) {
  constexpr auto kOp = "reduce_scatter_tensor";
  if (!split_sizes.has_value()) {
    return start_reduce_scatter(input, reduce_op, dim, group);
  }
  const BelowAutograd below_autograd;
  check_has_dims(input, kOp);
  check_reduction(input, reduce_op, *group, kOp);
  const auto parts = Parts::of_whole(input.sizes(), wrap_dim(dim, input, kOp), split_sizes, *group, kOp);
  if (parts.are_equal()) {
    return start_reduce_scatter(input, reduce_op, dim, group);
  }
  if (agreement_is_checked()) {
    agree(*group, kOp,
          c10::str(reduce_op_name(reduce_op), ", dim=", parts.dim(), ", split_sizes=", *split_sizes),
          describe_tensors(input));
  }
  settle(input);
  auto source = parts.pack_padded(input);
  auto received = fresh_tensor(parts.max_numel(), input);
  auto wire_in = wire_for_reduction(source);
  auto wire_out = wire_for_reduction(received);
  c10d::ReduceScatterOptions options;
  options.reduceOp = op_for_reduction(reduce_op, input.scalar_type());
  auto work = on_backend(*group, input.device().type(), [&](auto& target) {
    return compat::reduce_scatter_flat(target, wire_out, wire_in, options);
  });
  const auto rank = group->getRank();
  auto out = received.narrow(0, 0, parts.numel(rank)).view(parts.shape(rank));
  return {kOp, group, std::move(work), {std::move(source), std::move(received)}, {std::move(out)}, {}};
}

}  // namespace funcol
