
#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "compat/process_group.h"
#include "ops/collectives.h"
#include "ops/kinds.h"
#include "ops/layout_change.h"
#include "ops/parts.h"
#include "ops/wire.h"

namespace funcol {
namespace {

void check_divisible(const at::Tensor& input, int64_t dim, const c10d::ProcessGroup& group, const char* op) {
  dim = wrap_dim(dim, input, op);
  TORCH_CHECK_VALUE(input.dim() > 0, "funcol::", op,
                    ": a 0-dim tensor cannot be scattered. Pass one with a dim of ", group.getSize(),
                    " or a multiple.");
  TORCH_CHECK_VALUE(input.size(dim) % group.getSize() == 0, "funcol::", op, ": dim ", dim, " has size ",
                    input.size(dim), ", not divisible by the ", group.getSize(), " ranks of group '",
                    group_name(group), "'. Pad it, or scatter another dim.");
}

// `input` contiguous, with the ranks' blocks one after the other. In memory of its own, unless dim is 0.
at::Tensor rank_major_input(const at::Tensor& input, int64_t dim, int64_t num_ranks) {
  settle(input);
  if (dim == 0) {
    return contiguous_input(input);
  }
  return is_rank_major(input.sizes(), dim) ? private_input(input) : split_shards(input, num_ranks, dim);
}

at::Tensor empty_share(const at::Tensor& input, int64_t dim, int64_t num_ranks) {
  auto sizes = input.sizes().vec();
  sizes[dim] /= num_ranks;
  return fresh_tensor(sizes, input);
}

c10d::ReduceScatterOptions options_for(const c10d::ReduceOp& reduce_op, const at::Tensor& input) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op_for_reduction(reduce_op, input.scalar_type());
  return options;
}

// Backends scatter dim 0; where a layout change moved the blocks there, the output has another shape.
at::Tensor flat_wire(const at::Tensor& contiguous) { return wire_for_reduction(contiguous.view(-1)); }

}  // namespace

void check_reduce_scatter(at::TensorList inputs, const c10d::ReduceOp& reduce_op, at::IntArrayRef dims,
                          c10d::ProcessGroup& group, const char* op) {
  check_dim_per_tensor(inputs, dims, op);
  if (inputs.empty()) {
    return;
  }
  check_alike(inputs, op);
  check_reduction(inputs[0], reduce_op, group, op);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_divisible(inputs[i], dims[i], group, op);
  }
}

Start start_reduce_scatter(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t dim,
                           const GroupPtr& group) {
  constexpr auto kOp = "reduce_scatter_tensor";
  const BelowAutograd below_autograd;
  check_reduce_scatter(input, reduce_op, dim, *group, kOp);
  dim = wrap_dim(dim, input, kOp);
  const int64_t num_ranks = group->getSize();
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str(reduce_op_name(reduce_op), ", dim=", dim), describe_tensors(input));
  }
  auto source = rank_major_input(input, dim, num_ranks);
  auto out = empty_share(input, dim, num_ranks);
  auto wire_in = dim == 0 ? wire_for_reduction(source) : flat_wire(source);
  auto wire_out = dim == 0 ? wire_for_reduction(out) : flat_wire(out);
  auto work = on_backend(*group, source.device().type(), [&](auto& target) {
    return compat::reduce_scatter_flat(target, wire_out, wire_in, options_for(reduce_op, input));
  });
  return {kOp, group, std::move(work), as_list(std::move(source)), as_list(std::move(out)), {}};
}

// As in the uneven gather, each part travels padded to the largest one.
Start start_uneven_reduce_scatter(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t dim,
                                  at::OptionalIntArrayRef split_sizes, const GroupPtr& group) {
  constexpr auto kOp = "reduce_scatter_tensor";
  if (!split_sizes.has_value()) {
    return start_reduce_scatter(input, reduce_op, dim, group);
  }
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
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
  auto work = on_backend(*group, input.device().type(), [&](auto& target) {
    return compat::reduce_scatter_flat(target, wire_out, wire_in, options_for(reduce_op, input));
  });
  const auto rank = group->getRank();
  auto out = received.narrow(0, 0, parts.numel(rank)).view(parts.shape(rank));
  return {kOp, group, std::move(work), {std::move(source), std::move(received)}, as_list(std::move(out)), {}};
}

Start start_reduce_scatter_coalesced(at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                                     at::IntArrayRef dims, const GroupPtr& group) {
  constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  check_reduce_scatter(inputs, reduce_op, dims, *group, kOp);
  if (inputs.empty()) {
    return {kOp, group, {}, {}, {}, {}};
  }
  const BelowAutograd below_autograd;
  std::vector<int64_t> wrapped;
  wrapped.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    wrapped.push_back(wrap_dim(dims[i], inputs[i], kOp));
  }
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str(reduce_op_name(reduce_op), ", dims=", dims), describe_tensors(inputs));
  }
  const int64_t num_ranks = group->getSize();
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> wires_in;
  std::vector<at::Tensor> wires_out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    sources.push_back(rank_major_input(inputs[i], wrapped[i], num_ranks));
    outputs.push_back(empty_share(inputs[i], wrapped[i], num_ranks));
    wires_in.push_back(flat_wire(sources.back()));
    wires_out.push_back(flat_wire(outputs.back()));
  }
  auto work = on_backend(*group, inputs[0].device().type(), [&](auto& target) {
    return compat::reduce_scatter_flat_coalesced(target, wires_out, wires_in,
                                                 options_for(reduce_op, inputs[0]));
  });
  return {kOp, group, std::move(work), std::move(sources), std::move(outputs), {}};
}

Start start_reduce_scatter_out(const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                               const at::Tensor& out, const GroupPtr& group, const char* op) {
  const BelowAutograd below_autograd;
  check_one_device({input, out}, op);
  settle(out);
  check_reduce_scatter(input, reduce_op, int64_t{0}, *group, op);
  TORCH_CHECK_VALUE(out.numel() * group->getSize() == input.numel() && out.is_contiguous(), "funcol::", op,
                    ": out has shape ", out.sizes(), " and strides ", out.strides(),
                    ". Expected a contiguous tensor of 1/", group->getSize(),
                    " of the elements of the input of shape ", input.sizes(), ".");
  TORCH_CHECK_TYPE(out.scalar_type() == input.scalar_type(), "funcol::", op, ": out is ", out.scalar_type(),
                   ", input is ", input.scalar_type(), ". Pass an out of the input's dtype.");
  if (agreement_is_checked()) {
    agree(*group, op, c10::str(reduce_op_name(reduce_op), ", dim=0"), describe_tensors(input));
  }
  auto source = contiguous_input(input);
  const bool is_share = out.dim() == source.dim() && out.sizes().slice(1) == source.sizes().slice(1);
  auto wire_in = is_share ? wire_for_reduction(source) : flat_wire(source);
  auto wire_out = is_share ? wire_for_reduction(out) : flat_wire(out);
  auto work = on_backend(*group, source.device().type(), [&](auto& target) {
    return compat::reduce_scatter_flat(target, wire_out, wire_in, options_for(reduce_op, input));
  });
  return {op, group, std::move(work), as_list(std::move(source)), {out}, {}};
}

}  // namespace funcol
