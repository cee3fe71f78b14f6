#include "ops/spmd_types.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "async/dispatch_modes.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/layout_change.h"

namespace funcol::local_types {
namespace {

using at::Tensor;
using c10::IValue;
using Tensors = torch::autograd::variable_list;

bool has_dim(Type type) { return type == Type::kVarying || type == Type::kShard; }

bool is_same_everywhere(Type type) { return type == Type::kReplicate || type == Type::kInvariant; }

PlacedType of_gradient(const PlacedType& placed) {
  switch (placed.type) {
    case Type::kReplicate:
      return {Type::kPartial, 0};
    case Type::kPartial:
      return {Type::kReplicate, 0};
    default:
      return placed;
  }
}

Change of_gradient(const Change& change) {
  return {of_gradient(change.to), of_gradient(change.from), change.backward, {}, change.scatters_dim_first};
}

IValue packed(const Change& change) {
  const auto dtype = [](const std::optional<at::ScalarType>& dtype) {
    return dtype.has_value() ? static_cast<int64_t>(*dtype) : int64_t{-1};
  };
  return std::vector<int64_t>{static_cast<int64_t>(change.from.type),
                              change.from.dim,
                              static_cast<int64_t>(change.to.type),
                              change.to.dim,
                              dtype(change.forward.during),
                              dtype(change.forward.after),
                              dtype(change.backward.during),
                              dtype(change.backward.after),
                              change.scatters_dim_first};
}

Change unpacked(const IValue& value) {
  const auto ints = value.toIntVector();
  const auto dtype = [&](size_t i) {
    return ints[i] < 0 ? std::nullopt : std::optional(static_cast<at::ScalarType>(ints[i]));
  };
  return {{static_cast<Type>(ints[0]), ints[1]},
          {static_cast<Type>(ints[2]), ints[3]},
          {dtype(4), dtype(5)},
          {dtype(6), dtype(7)},
          ints[8] != 0};
}

Tensor in_dtype(const Tensor& tensor, const std::optional<at::ScalarType>& dtype) {
  return dtype.has_value() && *dtype != tensor.scalar_type() ? tensor.to(*dtype) : tensor;
}

// Returns this rank's part of a tensor that every rank has, in memory of its own.
Tensor own_part(const Tensor& full, const PlacedType& part, const GroupPtr& group) {
  if (part.type == Type::kVarying) {
    return full.select(part.dim, group->getRank()).clone(at::MemoryFormat::Contiguous);
  }
  const auto size = full.size(part.dim) / group->getSize();
  return full.narrow(part.dim, group->getRank() * size, size).clone(at::MemoryFormat::Contiguous);
}

bool is_watched(const Tensor& input) { return has_active_layers() || belongs_to_layer(input); }

// Returns the pending result of a collective: `change_view` of its only output.
template <typename ChangeView>
Tensor as_pending_view(StartedCollective start, const ChangeView& change_view) {
  const BelowAutograd below_autograd;
  start.outputs[0] = change_view(start.outputs[0]);
  return as_sole_pending(std::move(start));
}

Tensor gathered(const Tensor& part, const PlacedType& from, const GroupPtr& group) {
  if (from.type == Type::kVarying && !is_watched(part)) {
    settle(part);
    const BelowAutograd below_autograd;
    return as_sole_pending(start_all_gather(part.unsqueeze(from.dim), from.dim, group));
  }
  const auto shard = from.type == Type::kVarying ? part.unsqueeze(from.dim) : part;
  return call::all_gather_along_dim.unrecorded(shard, from.dim, as_ivalue(group), {});
}

// Returns this rank's part of the sum, with `dim` first in memory.
Tensor reduced_part_dim_first(const Tensor& partial, int64_t dim, const GroupPtr& group) {
  if (is_watched(partial)) {
    const auto rows = partial.movedim(dim, 0).contiguous();
    return call::reduce_scatter_along_dim.traced(rows, "sum", 0, as_ivalue(group), {}).movedim(0, dim);
  }
  settle(partial);
  const BelowAutograd below_autograd;
  const auto rows = private_input(partial.movedim(dim, 0));
  return as_pending_view(start_reduce_scatter(rows, c10d::ReduceOp::SUM, 0, group),
                         [&](const Tensor& part) { return part.movedim(0, dim); });
}

Tensor reduced_part(const Tensor& partial, const Change& change, const GroupPtr& group) {
  const auto [type, dim] = change.to;
  if (type == Type::kShard && dim != 0 && change.scatters_dim_first) {
    return reduced_part_dim_first(partial, dim, group);
  }
  if (type == Type::kVarying && !is_watched(partial)) {
    return as_pending_view(start_reduce_scatter(partial, c10d::ReduceOp::SUM, dim, group),
                           [dim = dim](const Tensor& part) { return part.squeeze(dim); });
  }
  const auto part = call::reduce_scatter_along_dim.unrecorded(partial, "sum", dim, as_ivalue(group), {});
  return type == Type::kVarying ? part.squeeze(dim) : part;
}

// Exchanges parts by ops that layers know.
Tensor composed_exchange(const Tensor& input, int64_t split_dim, int64_t concat_dim, bool stacks,
                         const GroupPtr& group) {
  const auto num_ranks = group->getSize();
  const auto rows =
      stacks ? input.movedim(split_dim, 0).contiguous()
             : (split_dim == 0 ? input.contiguous() : at::cat(input.chunk(num_ranks, split_dim), 0));
  const std::vector<c10::SymInt> splits(num_ranks, rows.sym_size(0) / num_ranks);
  const auto received = call::all_to_all_single.traced(rows, splits, splits, as_ivalue(group));
  return stacks            ? received.movedim(0, concat_dim).contiguous()
         : concat_dim == 0 ? received
                           : at::cat(received.chunk(num_ranks, 0), concat_dim);
}

Tensor exchanged(const Tensor& input, const Change& change, const GroupPtr& group) {
  const bool stacks = change.from.type == Type::kVarying;
  // A varying tensor is cut where it is stacked, a shard where it will be one.
  const auto split_dim = stacks ? change.from.dim : change.to.dim;
  const auto concat_dim = stacks ? change.to.dim : change.from.dim;
  if (is_watched(input)) {
    return composed_exchange(input, split_dim, concat_dim, stacks, group);
  }
  return as_sole_pending(start_all_to_all_dims(input, split_dim, concat_dim, stacks, group));
}

// Makes the change, with nothing recorded.
Tensor apply_unrecorded(const Tensor& input, const Change& change, const GroupPtr& group) {
  const auto from = change.from.type;
  const auto to = change.to.type;
  if (from == Type::kPartial) {
    return is_same_everywhere(to) ? call::all_reduce.unrecorded(input, "sum", as_ivalue(group))
                                  : reduced_part(input, change, group);
  }
  if (is_same_everywhere(from)) {
    return has_dim(to) ? own_part(input, change.to, group) : input;
  }
  return has_dim(to) ? exchanged(input, change, group) : gathered(input, change.from, group);
}

// Returns true if the backend reads the memory of the input itself.
bool reads_input(const Tensor& input, const Change& change) {
  if (change.from.type == Type::kPartial) {
    return has_dim(change.to.type) && change.to.dim == 0;
  }
  if (!has_dim(change.from.type)) {
    return false;
  }
  if (is_same_everywhere(change.to.type)) {
    return change.from.dim == 0;
  }
  const auto split_dim = change.from.type == Type::kVarying ? change.from.dim : change.to.dim;
  return is_rank_major(input.sizes(), split_dim);
}

Tensor apply_in_dtypes(const Tensor& input, const Change& change, const GroupPtr& group, bool keeps_input) {
  const auto sent = in_dtype(input, change.forward.during);
  const bool is_copied = !keeps_input && sent.is_same(input) && reads_input(input, change);
  const auto result =
      apply_unrecorded(is_copied ? sent.clone(at::MemoryFormat::Contiguous) : sent, change, group);
  return in_dtype(result, change.forward.after);
}

struct ChangeFunction : torch::autograd::Function<ChangeFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input, const Change& change,
                        const GroupPtr& group, bool keeps_input) {
    ctx->saved_data["change"] = packed(change);
    ctx->saved_data["group"] = as_ivalue(group);
    return apply_in_dtypes(input, change, group, keeps_input);
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& gradients) {
    const GradientCollectives collectives;
    const auto change = of_gradient(unpacked(ctx->saved_data["change"]));
    const auto group = group_from_ivalue(ctx->saved_data["group"], "spmd_types");
    const auto gradient = reads_input(gradients[0], change) ? GradientCollectives::unshared(gradients[0])
                                                            : Tensor(gradients[0]);
    return {apply_change(gradient, change, group, /*keeps_input=*/true), {}, {}, {}};
  }
};

}  // namespace

bool supports(const Tensor& input, const Change& change, const c10d::ProcessGroup& group) {
  const auto num_ranks = group.getSize();
  const auto is_number = at::isFloatingType(input.scalar_type()) ||
                         at::isIntegralType(input.scalar_type(), /*includeBool=*/false);
  if (!is_number || input.is_meta() || input.layout() != at::kStrided || input._fw_grad(0).defined()) {
    return false;
  }
  const auto from = change.from;
  const auto to = change.to;
  const auto is_dim = [&](const PlacedType& placed, int64_t num_dims) {
    return placed.dim >= 0 && placed.dim < num_dims;
  };
  // Either the part is cut from the input, or the input is such a part.
  const auto cuts = [&](const PlacedType& part) {
    return is_dim(part, input.dim()) && (part.type == Type::kVarying ? input.size(part.dim) == num_ranks
                                                                     : input.size(part.dim) % num_ranks == 0);
  };
  if (from.type == Type::kPartial || is_same_everywhere(from.type)) {
    if (has_dim(to.type)) {
      return from.type != Type::kReplicate && cuts(to);
    }
    // The input is the result only if a node of autograd makes a view of it.
    return from.type == Type::kPartial ? input.is_contiguous()
                                       : from.type == Type::kInvariant && to.type == Type::kReplicate &&
                                             autograd::needs_gradient(input);
  }
  const bool stacks = from.type == Type::kVarying;
  if (is_same_everywhere(to.type)) {
    return is_dim(from, input.dim() + (stacks ? 1 : 0));
  }
  return to.type == from.type && is_dim(from, input.dim()) && is_dim(to, input.dim()) &&
         cuts(stacks ? from : to);
}

Tensor apply_change(const Tensor& input, const Change& change, const GroupPtr& group, bool keeps_input) {
  return autograd::needs_gradient(input) ? ChangeFunction::apply(input, change, group, keeps_input)
                                         : apply_in_dtypes(input, change, group, keeps_input);
}

}  // namespace funcol::local_types
