#include <ATen/core/DimVector.h>
#include <ATen/ops/zeros.h>

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

at::DimVector gathered_sizes(const at::Tensor& input, int64_t dim, int64_t num_ranks) {
  at::DimVector sizes(input.sizes());
  if (sizes.empty()) {
    sizes.push_back(1);
  }
  sizes[dim] *= num_ranks;
  return sizes;
}

c10::intrusive_ptr<c10d::Work> start_flat(const at::Tensor& source, const at::Tensor& gathered,
                                          c10d::ProcessGroup& group) {
  auto wire_in = wire_for_movement(source, group);
  auto wire_out = wire_for_movement(gathered, group);
  return on_backend(group, source.device().type(),
                    [&](auto& target) { return compat::all_gather_flat(target, wire_out, wire_in, {}); });
}

}  // namespace

void check_all_gather(at::TensorList inputs, int64_t dim, const char* op) {
  check_one_device(inputs, op);
  for (const auto& input : inputs) {
    wrap_dim(dim, input, op);
  }
}

Start start_all_gather(const at::Tensor& input, int64_t dim, const GroupPtr& group) {
  constexpr auto kOp = "all_gather_into_tensor";
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  dim = wrap_dim(dim, input, kOp);
  auto source = dim == 0 ? contiguous_input(input) : private_input(input);
  const int64_t num_ranks = group->getSize();
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str("dim=", dim), describe_tensors(source));
  }

  auto gathered = fresh_tensor(gathered_sizes(source, 0, num_ranks), source);
  auto work = start_flat(source, gathered, *group);
  const auto sizes = gathered_sizes(source, dim, num_ranks);
  if (is_rank_major(sizes, dim)) {
    auto out = dim == 0 ? std::move(gathered) : in_shape(std::move(gathered), sizes);
    return {kOp, group, std::move(work), as_list(std::move(source)), as_list(std::move(out)), {}};
  }
  if (merges_in_place(gathered)) {
    const auto merge = [num_ranks, dim](const Start& start) {
      merge_shards_in_place(start.outputs[0], num_ranks, dim);
    };
    auto out = in_shape(std::move(gathered), sizes);
    return {kOp, group, std::move(work), as_list(std::move(source)), as_list(std::move(out)), merge};
  }
  const auto merge = [num_ranks, dim](const Start& start) {
    merge_shards(start.buffers[1], start.outputs[0], num_ranks, dim);
  };
  auto out = fresh_tensor(sizes, source);
  return {kOp,  group, std::move(work), {std::move(source), std::move(gathered)}, as_list(std::move(out)),
          merge};
}

// Backends gather equal parts, so each travels padded to the largest one; the epilogue leaves the padding
// out.
Start start_uneven_all_gather(const at::Tensor& input, int64_t dim, at::OptionalIntArrayRef split_sizes,
                              const GroupPtr& group) {
  constexpr auto kOp = "all_gather_tensor";
  if (!split_sizes.has_value()) {
    return start_all_gather(input, dim, group);
  }
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_has_dims(input, kOp);
  const auto parts = Parts::of_shard(input.sizes(), wrap_dim(dim, input, kOp), split_sizes, *group, kOp);
  if (parts.are_equal()) {
    return start_all_gather(input, dim, group);
  }
  if (agreement_is_checked()) {
    agree(*group, kOp, c10::str("dim=", parts.dim(), ", split_sizes=", *split_sizes),
          describe_tensors(input, parts.dim()));
  }
  const auto stride = parts.max_numel();
  at::Tensor source;
  if (input.numel() < stride) {
    source = at::zeros(stride, input.options());
    source.narrow(0, 0, input.numel()).copy_(contiguous_input(input).view(-1));
  } else {
    source = private_input(input).view(-1);
  }
  const auto gathered = fresh_tensor(parts.num_parts() * stride, input);
  auto work = start_flat(source, gathered, *group);
  auto out = fresh_tensor(parts.whole_shape(), input);
  const auto unpack = [parts, stride](const Start& start) {
    parts.unpack(start.buffers[1], stride, start.outputs[0]);
  };
  return {kOp, group, std::move(work), {std::move(source), gathered}, as_list(std::move(out)), unpack};
}

Start start_all_gather_coalesced(at::TensorList inputs, const GroupPtr& group) {
  constexpr auto kOp = "all_gather_into_tensor_coalesced";
  if (inputs.empty()) {
    return {kOp, group, {}, {}, {}, {}};
  }
  const BelowAutograd below_autograd;
  check_all_gather(inputs, 0, kOp);
  if (agreement_is_checked()) {
    agree(*group, kOp, "", describe_tensors(inputs));
  }
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> wires_in;
  std::vector<at::Tensor> wires_out;
  for (const auto& input : inputs) {
    sources.push_back(contiguous_input(input));
    outputs.push_back(fresh_tensor(gathered_sizes(input, 0, group->getSize()), input));
    wires_in.push_back(wire_for_movement(sources.back(), *group));
    wires_out.push_back(wire_for_movement(outputs.back(), *group));
  }
  auto work = on_backend(*group, inputs[0].device().type(), [&](auto& target) {
    return compat::all_gather_flat_coalesced(target, wires_out, wires_in, {});
  });
  return {kOp, group, std::move(work), std::move(sources), std::move(outputs), {}};
}

Start start_all_gather_out(const at::Tensor& input, const at::Tensor& out, const GroupPtr& group,
                           const char* op) {
  const BelowAutograd below_autograd;
  check_one_device({input, out}, op);
  settle(out);
  const auto sizes = gathered_sizes(input, 0, group->getSize());
  TORCH_CHECK_VALUE(out.numel() == input.numel() * group->getSize() && out.is_contiguous(), "funcol::", op,
                    ": out has shape ", out.sizes(), " and strides ", out.strides(),
                    ". Expected a contiguous tensor of shape ", at::IntArrayRef(sizes), ".");
  TORCH_CHECK_TYPE(out.scalar_type() == input.scalar_type(), "funcol::", op, ": out is ", out.scalar_type(),
                   ", input is ", input.scalar_type(), ". Pass an out of the input's dtype.");
  if (agreement_is_checked()) {
    agree(*group, op, "dim=0", describe_tensors(input));
  }
  auto source = contiguous_input(input);
  auto work = start_flat(source, out.sizes() == at::IntArrayRef(sizes) ? out : out.view(sizes), *group);
  return {op, group, std::move(work), as_list(std::move(source)), {out}, {}};
}

Start start_all_gather_into_list(at::TensorList outs, const at::Tensor& input, const GroupPtr& group) {
  constexpr auto kOp = "all_gather_into_tensor";
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_dense(outs, kOp);
  auto source = contiguous_input(input);
  if (agreement_is_checked()) {
    agree(*group, kOp, "dim=0", describe_tensors(source));
  }
  std::vector<at::Tensor> wires_in{wire_for_movement(source, *group)};
  std::vector<std::vector<at::Tensor>> wires_out(1);
  wires_out[0].reserve(outs.size());
  for (const auto& out : outs) {
    settle(out);
    wires_out[0].push_back(wire_for_movement(out, *group));
  }
  auto work = on_backend(*group, source.device().type(),
                         [&](auto& target) { return target.allgather(wires_out, wires_in); });
  return {kOp, group, std::move(work), as_list(std::move(source)), outs.vec(), {}};
}

}  // namespace funcol
