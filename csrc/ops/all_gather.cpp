#include <ATen/core/DimVector.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "comm/process_group.h"
#include "compat/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/core_call.h"
#include "ops/layout_change.h"
#include "ops/meta.h"
#include "ops/operator.h"
#include "ops/parts.h"

namespace funcol {
namespace all_gather {
namespace {

using c10::IValue;
using c10::SymInt;
using Splits = at::OptionalSymIntArrayRef;
using Tensors = std::vector<at::Tensor>;

constexpr auto kRows = "all_gather_into_tensor";
constexpr auto kAlongDim = "all_gather_tensor";
constexpr auto kCoalesced = "all_gather_into_tensor_coalesced";

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

// Forms along dim 0.

StartedCollective start_rows(const at::Tensor& input, int64_t group_size, const GroupPtr& group) {
  check_group_size(*group, group_size, kRows);
  return start_all_gather(input, 0, group);
}

at::Tensor rows_meta(const at::Tensor& input, int64_t group_size, const IValue&) {
  auto sizes = sizes_with_dims(input);
  sizes[0] = sizes[0] * group_size;
  return meta_of_sizes(input, sizes);
}

at::Tensor rows_recorded(const at::Tensor& input, int64_t group_size, const IValue& group) {
  group_of_size(group, group_size, kRows);
  return call::all_gather_along_dim.recorded(input, 0, group, {});
}

StartedCollective start_rows_out(const at::Tensor& input, int64_t group_size, const GroupPtr& group,
                                 const at::Tensor& out) {
  check_group_size(*group, group_size, "all_gather_into_tensor_out");
  return start_all_gather_out(input, out, group);
}

// Forms along any dim, of any sizes.

at::Tensor meta(const at::Tensor& input, int64_t dim, const IValue& group, Splits split_sizes) {
  dim = wrap_dim(dim, input, kAlongDim);
  if (split_sizes.has_value()) {
    check_has_dims(input, kAlongDim);
  }
  auto sizes = sizes_with_dims(input);
  const auto resolved = group_from_ivalue(group, kAlongDim);
  sizes[dim] = sum(sizes_of_shards(sizes[dim], dim, split_sizes, *resolved, kAlongDim));
  return meta_of_sizes(input, sizes);
}

at::Tensor traced(const at::Tensor& input, int64_t dim, const IValue& group, Splits split_sizes) {
  const auto resolved = group_from_ivalue(group, kAlongDim);
  const auto num_ranks = resolved->getSize();
  dim = wrap_dim(dim, input, kAlongDim);
  if (!split_sizes.has_value()) {
    const auto gathered = call::all_gather_into_tensor.traced(input.contiguous(), num_ranks, group);
    return dim == 0 ? gathered : at::cat(gathered.chunk(num_ranks, 0), dim);
  }
  check_has_dims(input, kAlongDim);
  const TracedParts parts(input, dim,
                          sizes_of_shards(input.sym_size(dim), dim, split_sizes, *resolved, kAlongDim));
  const auto numel = core::largest(parts.numels);
  const auto padded = core::pad_to(input.flatten(), 0, numel);
  auto flat_parts = call::all_gather_into_tensor.traced(padded.contiguous(), num_ranks, group)
                        .split_with_sizes_symint(SymSizes(num_ranks, numel));
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    flat_parts[rank] = flat_parts[rank].narrow_symint(0, SymInt(0), parts.numels[rank]);
  }
  return parts.concatenated(std::move(flat_parts));
}

Tensors rule(const Tensors& gradients, const autograd::Values&, const autograd::Data& data) {
  const auto dim = data[0].toInt();
  const autograd::SavedSizes sizes(data[2]);
  const bool is_packed = sizes.has_value() || (dim != 0 && dim + gradients[0].dim() != 0);
  const auto gradient = is_packed ? gradients[0] : GradientCollectives::unshared(gradients[0]);
  const auto own = call::reduce_scatter_along_dim(gradient, "sum", dim, data[1], sizes);
  return {data[3].toBool() ? own.squeeze(0) : own};
}

autograd::Data saved(const at::Tensor& input, int64_t dim, const IValue& group, Splits split_sizes) {
  return {dim, group, autograd::saved_sizes(split_sizes), input.dim() == 0};
}

// Forms of several tensors along dim 0.

StartedCollective start_coalesced(at::TensorList inputs, int64_t group_size, const GroupPtr& group) {
  check_group_size(*group, group_size, kCoalesced);
  return start_all_gather_coalesced(inputs, group);
}

Tensors coalesced_meta(at::TensorList inputs, int64_t group_size, const IValue& group) {
  return meta_of_each(inputs, [&](const at::Tensor& input) { return rows_meta(input, group_size, group); });
}

Tensors coalesced_traced(at::TensorList inputs, int64_t group_size, const IValue& group) {
  Tensors wires;
  for (const auto& input : inputs) {
    wires.push_back(core::as_pairs(input).contiguous());
  }
  auto gathered = core::call_and_wait(kCoalesced, {wires, group_size, group}).toTensorVector();
  for (size_t i = 0; i < gathered.size(); ++i) {
    gathered[i] = core::from_pairs(gathered[i], inputs[i]);
  }
  return gathered;
}

// Returns this rank's parts of the sums of `full_tensors`: by one reduce_scatter if dtypes are equal, else
// one each.
Tensors reduced_parts(const Tensors& full_tensors, const IValue& group) {
  const auto is_like_first = [&](const at::Tensor& full) {
    return full.scalar_type() == full_tensors[0].scalar_type();
  };
  if (std::ranges::all_of(full_tensors, is_like_first)) {
    const std::vector<int64_t> dims(full_tensors.size(), 0);
    return call::reduce_scatter_along_dims_coalesced(full_tensors, "sum", dims, group);
  }
  Tensors parts;
  for (const auto& full : full_tensors) {
    parts.push_back(call::reduce_scatter_along_dim(full, "sum", 0, group, {}));
  }
  return parts;
}

Tensors coalesced_rule(const Tensors& gradients, const autograd::Values&, const autograd::Data& data) {
  const auto are_scalars = data[0].toBoolList();
  auto own = reduced_parts(GradientCollectives::unshared(gradients), data[1]);
  for (size_t i = 0; i < own.size(); ++i) {
    own[i] = are_scalars[i] ? own[i].squeeze(0) : own[i];
  }
  return own;
}

autograd::Data coalesced_saved(at::TensorList inputs, int64_t group_size, const IValue& group) {
  group_of_size(group, group_size, kCoalesced);
  c10::List<bool> are_scalars;
  for (const auto& input : inputs) {
    are_scalars.push_back(input.dim() == 0);
  }
  return {are_scalars, group};
}

const auto kOut = in_place({.name = "all_gather_into_tensor_out"}, from_stack(start_rows_out));

}  // namespace
}  // namespace all_gather

void check_all_gather(at::TensorList inputs, int64_t dim, const char* op) {
  check_one_device(inputs, op);
  for (const auto& input : inputs) {
    wrap_dim(dim, input, op);
  }
}

StartedCollective start_all_gather(const at::Tensor& input, int64_t dim, const GroupPtr& group) {
  constexpr auto kOp = all_gather::kRows;
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  dim = wrap_dim(dim, input, kOp);
  auto source = dim == 0 ? contiguous_input(input) : private_input(input);
  const int64_t num_ranks = group->getSize();
  agree_if_checked(*group, kOp, source, "dim=", dim);

  auto gathered = fresh_tensor(all_gather::gathered_sizes(source, 0, num_ranks), source);
  const auto sizes = all_gather::gathered_sizes(source, dim, num_ranks);
  const bool is_in_order = is_rank_major(sizes, dim);
  const bool is_merged = !is_in_order && !merges_in_place(gathered);
  auto merged = is_merged ? fresh_tensor(sizes, source) : at::Tensor();
  auto work = all_gather::start_flat(source, gathered, *group);
  StartedCollective start{kOp, group, std::move(work), as_list(std::move(source)), {}, {}};
  if (is_merged) {
    start.buffers.push_back(std::move(gathered));
    start.outputs = as_list(std::move(merged));
    start.epilogue = [num_ranks, dim](const StartedCollective& start) {
      merge_shards(start.buffers[1], start.outputs[0], num_ranks, dim);
    };
    return start;
  }
  start.outputs = as_list(dim == 0 ? std::move(gathered) : in_shape(std::move(gathered), sizes));
  if (!is_in_order) {
    start.epilogue = [num_ranks, dim](const StartedCollective& start) {
      merge_shards_in_place(start.outputs[0], num_ranks, dim);
    };
  }
  return start;
}

// Pads the elements of each part to those of the largest one, since backends gather equal parts; the epilogue
// leaves the padding out.
StartedCollective start_uneven_all_gather(const at::Tensor& input, int64_t dim, const GroupPtr& group,
                                          at::OptionalIntArrayRef split_sizes) {
  constexpr auto kOp = all_gather::kAlongDim;
  const auto start_even = [&] {
    auto start = start_all_gather(input, dim, group);
    start.op = kOp;
    return start;
  };
  if (!split_sizes.has_value()) {
    return start_even();
  }
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_has_dims(input, kOp);
  const auto parts = Parts::of_shard(input.sizes(), wrap_dim(dim, input, kOp), split_sizes, *group, kOp);
  if (parts.are_equal()) {
    return start_even();
  }
  agree_if_checked(*group, kOp, {input, parts.dim()}, "dim=", parts.dim(), ", split_sizes=", *split_sizes);
  const auto stride = parts.max_numel();
  at::Tensor source;
  if (input.numel() < stride) {
    source = at::zeros(stride, input.options());
    source.narrow(0, 0, input.numel()).copy_(contiguous_input(input).view(-1));
  } else {
    source = private_input(input).view(-1);
  }
  const auto gathered = fresh_tensor(parts.num_parts() * stride, input);
  auto out = fresh_tensor(parts.full_shape(), input);
  auto work = all_gather::start_flat(source, gathered, *group);
  const auto unpack = [parts, stride](const StartedCollective& start) {
    parts.unpack(start.buffers[1], stride, start.outputs[0]);
  };
  return {kOp, group, std::move(work), {std::move(source), gathered}, as_list(std::move(out)), unpack};
}

StartedCollective start_all_gather_coalesced(at::TensorList inputs, const GroupPtr& group) {
  constexpr auto kOp = all_gather::kCoalesced;
  if (inputs.empty()) {
    return {kOp, group, {}, {}, {}, {}};
  }
  const BelowAutograd below_autograd;
  check_all_gather(inputs, 0, kOp);
  agree_if_checked(*group, kOp, inputs);
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> wires_in;
  std::vector<at::Tensor> wires_out;
  for (const auto& input : inputs) {
    sources.push_back(contiguous_input(input));
    outputs.push_back(fresh_tensor(all_gather::gathered_sizes(input, 0, group->getSize()), input));
    wires_in.push_back(wire_for_movement(sources.back(), *group));
    wires_out.push_back(wire_for_movement(outputs.back(), *group));
  }
  auto work = on_backend(*group, inputs[0].device().type(), [&](auto& target) {
    return compat::all_gather_flat_coalesced(target, wires_out, wires_in, {});
  });
  return {kOp, group, std::move(work), std::move(sources), std::move(outputs), {}};
}

StartedCollective start_all_gather_out(const at::Tensor& input, const at::Tensor& out, const GroupPtr& group,
                                       const char* op) {
  const BelowAutograd below_autograd;
  check_one_device({input, out}, op);
  settle(out);
  const auto sizes = all_gather::gathered_sizes(input, 0, group->getSize());
  TORCH_CHECK_VALUE(out.numel() == input.numel() * group->getSize() && out.is_contiguous(), "funcol::", op,
                    ": out has shape ", out.sizes(), " and strides ", out.strides(),
                    ". Expected a contiguous tensor of shape ", at::IntArrayRef(sizes), ".");
  TORCH_CHECK_TYPE(out.scalar_type() == input.scalar_type(), "funcol::", op, ": out is ", out.scalar_type(),
                   ", input is ", input.scalar_type(), ". Pass an out of the input's dtype.");
  agree_if_checked(*group, op, input, "dim=0");
  auto source = contiguous_input(input);
  auto work =
      all_gather::start_flat(source, out.sizes() == at::IntArrayRef(sizes) ? out : out.view(sizes), *group);
  return {op, group, std::move(work), as_list(std::move(source)), {out}, {}};
}

StartedCollective start_all_gather_into_list(at::TensorList outs, const at::Tensor& input,
                                             const GroupPtr& group) {
  constexpr auto kOp = all_gather::kRows;
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_dense(outs, kOp);
  auto source = contiguous_input(input);
  agree_if_checked(*group, kOp, source, "dim=0");
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

const decltype(call::all_gather_into_tensor) call::all_gather_into_tensor(
    {.name = "all_gather_into_tensor"}, all_gather::start_rows,
    {.meta = all_gather::rows_meta, .recorded = all_gather::rows_recorded, .is_in_core = true});

const decltype(call::all_gather_along_dim) call::all_gather_along_dim({.name = "all_gather_along_dim",
                                                                       .op = all_gather::kAlongDim},
                                                                      start_uneven_all_gather,
                                                                      {.meta = all_gather::meta,
                                                                       .traced = all_gather::traced,
                                                                       .rule = all_gather::rule,
                                                                       .saved = all_gather::saved});

const decltype(call::all_gather_into_tensor_coalesced) call::all_gather_into_tensor_coalesced(
    {.name = "all_gather_into_tensor_coalesced"}, all_gather::start_coalesced,
    {.meta = all_gather::coalesced_meta,
     .traced = all_gather::coalesced_traced,
     .rule = all_gather::coalesced_rule,
     .saved = all_gather::coalesced_saved,
     .check = check_one_device,
     .is_in_core = true});

}  // namespace funcol
