#include <ATen/ops/cat.h>

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
#include "ops/gradient.h"
#include "ops/layout_change.h"
#include "ops/meta.h"
#include "ops/operator.h"
#include "ops/parts.h"

namespace funcol {
namespace reduce_scatter {
namespace {

using c10::IValue;
using c10::SymInt;
using Splits = at::OptionalSymIntArrayRef;
using Tensors = std::vector<at::Tensor>;

constexpr auto kOp = "reduce_scatter_tensor";
constexpr auto kCoalesced = "reduce_scatter_tensor_coalesced";

void check_divisible(const at::Tensor& input, int64_t dim, const c10d::ProcessGroup& group, const char* op) {
  dim = wrap_dim(dim, input, op);
  TORCH_CHECK_VALUE(input.dim() > 0, "funcol::", op,
                    ": a 0-dim tensor cannot be scattered. Pass one with a dim of ", group.getSize(),
                    " or a multiple.");
  TORCH_CHECK_VALUE(input.size(dim) % group.getSize() == 0, "funcol::", op, ": dim ", dim, " has size ",
                    input.size(dim), ", not divisible by the ", group.getSize(), " ranks of group '",
                    group_name(group), "'. Pad it, or scatter another dim.");
}

// Returns `input`, contiguous, the ranks' blocks one after the other; in its own memory unless dim is 0.
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

c10::intrusive_ptr<c10d::Work> start_flat(at::Tensor wire_in, at::Tensor wire_out,
                                          const c10d::ReduceOp& reduce_op, const at::Tensor& input,
                                          c10d::ProcessGroup& group) {
  return on_backend(group, input.device().type(), [&](auto& target) {
    return compat::reduce_scatter_flat(target, wire_out, wire_in, options_for(reduce_op, input));
  });
}

// Returns a flat wire: backends scatter dim 0, but after a layout change the output has another shape.
at::Tensor flat_wire(const at::Tensor& contiguous) { return wire_for_reduction(contiguous.view(-1)); }

// Forms along dim 0.

StartedCollective start_rows(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t group_size,
                             const GroupPtr& group) {
  check_group_size(*group, group_size, kOp);
  return start_reduce_scatter(input, reduce_op, 0, group);
}

at::Tensor rows_meta(const at::Tensor& input, std::string_view, int64_t group_size, const IValue&) {
  auto sizes = input.sym_sizes().vec();
  sizes.at(0) = sizes[0] / SymInt(group_size);
  return meta_of_sizes(input, sizes);
}

at::Tensor rows_recorded(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                         const IValue& group) {
  group_of_size(group, group_size, kOp);
  return call::reduce_scatter_along_dim.recorded(input, std::string(reduce_op), 0, group, {});
}

StartedCollective start_rows_out(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t group_size,
                                 const GroupPtr& group, const at::Tensor& out) {
  check_group_size(*group, group_size, "reduce_scatter_tensor_out");
  return start_reduce_scatter_out(input, reduce_op, out, group);
}

// Forms along any dim, in parts of any sizes.

at::Tensor meta(const at::Tensor& input, const IValue& reduce_op, int64_t dim, const IValue& group,
                Splits split_sizes) {
  reduce_op_from_ivalue(reduce_op, kOp);
  return meta_of_own_part(input, dim, *group_from_ivalue(group, kOp), split_sizes, kOp);
}

at::Tensor traced(const at::Tensor& input, const IValue& reduce_op, int64_t dim, const IValue& group,
                  Splits split_sizes) {
  const auto resolved = group_from_ivalue(group, kOp);
  const auto num_ranks = resolved->getSize();
  const auto name = core::as_name(reduce_op, "reduce_op", kOp);
  reduce_op_from_ivalue(reduce_op, kOp);
  check_has_dims(input, kOp);
  dim = wrap_dim(dim, input, kOp);
  const auto sizes = sizes_of_parts(input.sym_size(dim), dim, split_sizes, *resolved, kOp);
  if (!split_sizes.has_value()) {
    const auto rows = dim == 0 ? input : at::cat(input.split_with_sizes_symint(sizes, dim));
    return call::reduce_scatter_tensor.traced(rows.contiguous(), name.toStringView(), num_ranks, group);
  }
  auto parts = input.split_with_sizes_symint(sizes, dim);
  SymSizes numels;
  for (auto& part : parts) {
    part = part.flatten();
    numels.push_back(part.sym_numel());
  }
  const auto numel = core::largest(numels);
  for (auto& part : parts) {
    part = core::pad_to(part, 0, numel);
  }
  const auto received =
      call::reduce_scatter_tensor.traced(at::cat(parts), name.toStringView(), num_ranks, group);
  const auto rank = resolved->getRank();
  auto shape = input.sym_sizes().vec();
  shape[dim] = sizes[rank];
  return received.narrow_symint(0, SymInt(0), numels[rank]).view_symint(shape);
}

Tensors rule(const Tensors& gradients, const autograd::Values& values, const autograd::Data& data) {
  const auto& reduce_op = data[0];
  const auto& group = data[2];
  const autograd::SavedSizes sizes(data[3]);
  const auto gathered = [&](const at::Tensor& part) {
    return call::all_gather_along_dim(part, data[1].toInt(), group, sizes);
  };
  const auto part = GradientCollectives::unshared(gradients[0]);
  auto total = gathered(autograd::weighted(part, reduce_op, group, kOp));
  auto results = GradientCollectives::unshared(values.outputs);
  std::ranges::transform(results, results.begin(), gathered);
  return autograd::reduction_gradients({std::move(total)}, values.inputs, results, reduce_op, group, kOp);
}

// Forms of several tensors along dim 0.

StartedCollective start_coalesced_rows(at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                                       int64_t group_size, const GroupPtr& group) {
  check_group_size(*group, group_size, kCoalesced);
  const std::vector<int64_t> dims(inputs.size(), 0);
  return start_reduce_scatter_coalesced(inputs, reduce_op, dims, group);
}

Tensors coalesced_rows_meta(at::TensorList inputs, std::string_view reduce_op, int64_t group_size,
                            const IValue& group) {
  return meta_of_each(
      inputs, [&](const at::Tensor& input) { return rows_meta(input, reduce_op, group_size, group); });
}

Tensors coalesced_rows_recorded(at::TensorList inputs, std::string_view reduce_op, int64_t group_size,
                                const IValue& group) {
  group_of_size(group, group_size, kCoalesced);
  const std::vector<int64_t> dims(inputs.size(), 0);
  return call::reduce_scatter_along_dims_coalesced.recorded(inputs, std::string(reduce_op), dims, group);
}

// Forms of several tensors, each along a dim.

Tensors coalesced_meta(at::TensorList inputs, const IValue& reduce_op, at::IntArrayRef dims,
                       const IValue& group) {
  reduce_op_from_ivalue(reduce_op, kCoalesced);
  check_dim_per_tensor(inputs, dims, kCoalesced);
  const auto resolved = group_from_ivalue(group, kCoalesced);
  Tensors results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    results.push_back(meta_of_own_part(inputs[i], dims[i], *resolved, {}, kCoalesced));
  }
  return results;
}

Tensors coalesced_traced(at::TensorList inputs, const IValue& reduce_op, at::IntArrayRef dims,
                         const IValue& group) {
  const auto resolved = group_from_ivalue(group, kCoalesced);
  const auto name = core::as_name(reduce_op, "reduce_op", kCoalesced);
  reduce_op_from_ivalue(reduce_op, kCoalesced);
  check_dim_per_tensor(inputs, dims, kCoalesced);
  Tensors rows;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_has_dims(inputs[i], kCoalesced);
    const auto dim = wrap_dim(dims[i], inputs[i], kCoalesced);
    const auto sizes = sizes_of_parts(inputs[i].sym_size(dim), dim, {}, *resolved, kCoalesced);
    rows.push_back(dim == 0 ? inputs[i].contiguous()
                            : at::cat(inputs[i].split_with_sizes_symint(sizes, dim)));
  }
  return call::reduce_scatter_tensor_coalesced.traced(rows, name.toStringView(), resolved->getSize(), group);
}

// Returns the full tensors of which `parts` are this rank's parts: by one gather if all dims are 0, else one
// each.
Tensors gathered_parts(const Tensors& parts, at::IntArrayRef dims, const IValue& group) {
  if (std::ranges::all_of(dims, [](int64_t dim) { return dim == 0; })) {
    const auto num_ranks = group_from_ivalue(group, kCoalesced)->getSize();
    return call::all_gather_into_tensor_coalesced(parts, num_ranks, group);
  }
  Tensors full_tensors;
  for (size_t i = 0; i < parts.size(); ++i) {
    full_tensors.push_back(call::all_gather_along_dim(parts[i], dims[i], group, {}));
  }
  return full_tensors;
}

Tensors coalesced_rule(const Tensors& gradients, const autograd::Values& values, const autograd::Data& data) {
  const auto& reduce_op = data[0];
  const auto dims = data[1].toIntVector();
  const auto& group = data[2];
  Tensors parts;
  for (const auto& gradient : gradients) {
    parts.push_back(
        autograd::weighted(GradientCollectives::unshared(gradient), reduce_op, group, kCoalesced));
  }
  const auto saved = GradientCollectives::unshared(values.outputs);
  const auto results = saved.empty() ? Tensors() : gathered_parts(saved, dims, group);
  return autograd::reduction_gradients(gathered_parts(parts, dims, group), values.inputs, results, reduce_op,
                                       group, kCoalesced);
}

const auto kOut = in_place({.name = "reduce_scatter_tensor_out"}, from_stack(start_rows_out));

}  // namespace
}  // namespace reduce_scatter

void check_reduce_scatter(at::TensorList inputs, const c10d::ReduceOp& reduce_op, at::IntArrayRef dims,
                          c10d::ProcessGroup& group, const char* op) {
  check_dim_per_tensor(inputs, dims, op);
  if (inputs.empty()) {
    return;
  }
  check_one_device_and_dtype(inputs, op);
  check_reduction(inputs[0], reduce_op, group, op);
  for (size_t i = 0; i < inputs.size(); ++i) {
    reduce_scatter::check_divisible(inputs[i], dims[i], group, op);
  }
}

StartedCollective start_reduce_scatter(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t dim,
                                       const GroupPtr& group) {
  using reduce_scatter::kOp;
  const BelowAutograd below_autograd;
  check_reduce_scatter(input, reduce_op, dim, *group, kOp);
  dim = wrap_dim(dim, input, kOp);
  const int64_t num_ranks = group->getSize();
  agree_if_checked(*group, kOp, input, reduce_op_name(reduce_op), ", dim=", dim);
  auto source = reduce_scatter::rank_major_input(input, dim, num_ranks);
  auto out = reduce_scatter::empty_share(input, dim, num_ranks);
  const auto wire = dim == 0 ? wire_for_reduction : reduce_scatter::flat_wire;
  auto work = reduce_scatter::start_flat(wire(source), wire(out), reduce_op, input, *group);
  return {kOp, group, std::move(work), as_list(std::move(source)), as_list(std::move(out)), {}};
}

// Pads each part to the largest one, as the uneven gather does.
StartedCollective start_uneven_reduce_scatter(const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                                              int64_t dim, const GroupPtr& group,
                                              at::OptionalIntArrayRef split_sizes) {
  using reduce_scatter::kOp;
  if (!split_sizes.has_value()) {
    return start_reduce_scatter(input, reduce_op, dim, group);
  }
  const BelowAutograd below_autograd;
  check_dense(input, kOp);
  check_has_dims(input, kOp);
  check_reduction(input, reduce_op, *group, kOp);
  const auto parts = Parts::of_full(input.sizes(), wrap_dim(dim, input, kOp), split_sizes, *group, kOp);
  if (parts.are_equal()) {
    return start_reduce_scatter(input, reduce_op, dim, group);
  }
  agree_if_checked(*group, kOp, input, reduce_op_name(reduce_op), ", dim=", parts.dim(),
                   ", split_sizes=", *split_sizes);
  settle(input);
  auto source = parts.pack_padded(input);
  auto received = fresh_tensor(parts.max_numel(), input);
  auto work = reduce_scatter::start_flat(wire_for_reduction(source), wire_for_reduction(received), reduce_op,
                                         input, *group);
  const auto rank = group->getRank();
  auto out = received.narrow(0, 0, parts.numel(rank)).view(parts.shape(rank));
  return {kOp, group, std::move(work), {std::move(source), std::move(received)}, as_list(std::move(out)), {}};
}

StartedCollective start_reduce_scatter_coalesced(at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                                                 at::IntArrayRef dims, const GroupPtr& group) {
  constexpr auto kOp = reduce_scatter::kCoalesced;
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
  agree_if_checked(*group, kOp, inputs, reduce_op_name(reduce_op), ", dims=", dims);
  const int64_t num_ranks = group->getSize();
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> wires_in;
  std::vector<at::Tensor> wires_out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    sources.push_back(reduce_scatter::rank_major_input(inputs[i], wrapped[i], num_ranks));
    outputs.push_back(reduce_scatter::empty_share(inputs[i], wrapped[i], num_ranks));
    wires_in.push_back(reduce_scatter::flat_wire(sources.back()));
    wires_out.push_back(reduce_scatter::flat_wire(outputs.back()));
  }
  auto work = on_backend(*group, inputs[0].device().type(), [&](auto& target) {
    return compat::reduce_scatter_flat_coalesced(target, wires_out, wires_in,
                                                 reduce_scatter::options_for(reduce_op, inputs[0]));
  });
  return {kOp, group, std::move(work), std::move(sources), std::move(outputs), {}};
}

StartedCollective start_reduce_scatter_out(const at::Tensor& input, const c10d::ReduceOp& reduce_op,
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
  agree_if_checked(*group, op, input, reduce_op_name(reduce_op), ", dim=0");
  auto source = contiguous_input(input);
  const bool is_share = out.dim() == source.dim() && out.sizes().slice(1) == source.sizes().slice(1);
  const auto wire = is_share ? wire_for_reduction : reduce_scatter::flat_wire;
  auto work = reduce_scatter::start_flat(wire(source), wire(out), reduce_op, input, *group);
  return {op, group, std::move(work), as_list(std::move(source)), {out}, {}};
}

const decltype(call::reduce_scatter_tensor) call::reduce_scatter_tensor(
    {.name = "reduce_scatter_tensor"}, reduce_scatter::start_rows,
    {.meta = reduce_scatter::rows_meta, .recorded = reduce_scatter::rows_recorded, .is_in_core = true});

const decltype(call::reduce_scatter_along_dim) call::reduce_scatter_along_dim(
    {.name = "reduce_scatter_along_dim", .op = reduce_scatter::kOp}, start_uneven_reduce_scatter,
    {.meta = reduce_scatter::meta,
     .traced = reduce_scatter::traced,
     .rule = reduce_scatter::rule,
     .saves_reduce_op = true});

const decltype(call::reduce_scatter_tensor_coalesced) call::reduce_scatter_tensor_coalesced(
    {.name = "reduce_scatter_tensor_coalesced"}, reduce_scatter::start_coalesced_rows,
    {.meta = reduce_scatter::coalesced_rows_meta,
     .recorded = reduce_scatter::coalesced_rows_recorded,
     .check = check_one_device_and_dtype,
     .is_in_core = true});

const decltype(call::reduce_scatter_along_dims_coalesced) call::reduce_scatter_along_dims_coalesced(
    {.name = "reduce_scatter_along_dims_coalesced", .op = reduce_scatter::kCoalesced},
    start_reduce_scatter_coalesced,
    {.meta = reduce_scatter::coalesced_meta,
     .traced = reduce_scatter::coalesced_traced,
     .rule = reduce_scatter::coalesced_rule,
     .saves_reduce_op = true,
     .check = check_one_device_and_dtype});

}  // namespace funcol
