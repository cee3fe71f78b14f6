// gather: an exchange in which the destination alone receives. A backend moves as many bytes as in a gather
// of its own, and parts may differ in size.
#include <utility>

#include "comm/agreement.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/meta.h"
#include "ops/parts.h"

namespace funcol {
namespace gather {
namespace {

using c10::IValue;
using c10::SymInt;
using Splits = at::OptionalSymIntArrayRef;
using Tensors = std::vector<at::Tensor>;

constexpr auto kOp = "gather";

at::Tensor meta(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                Splits split_sizes) {
  const auto resolved = group_from_ivalue(group, kOp);
  check_has_dims(input, kOp);
  check_rank(destination, *resolved, "dst", kOp);
  dim = wrap_dim(dim, input, kOp);
  auto sizes = input.sym_sizes().vec();
  const auto full_size = sum(sizes_of_shards(sizes[dim], dim, split_sizes, *resolved, kOp));
  sizes[dim] = resolved->getRank() == destination ? full_size : SymInt(0);
  return meta_of_sizes(input, sizes);
}

at::Tensor traced(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                  Splits split_sizes) {
  const auto resolved = group_from_ivalue(group, kOp);
  check_has_dims(input, kOp);
  check_rank(destination, *resolved, "dst", kOp);
  dim = wrap_dim(dim, input, kOp);
  const TracedParts parts(input, dim, sizes_of_shards(input.sym_size(dim), dim, split_sizes, *resolved, kOp));
  const bool receives = resolved->getRank() == destination;
  const auto received = receives ? parts.numels : SymSizes(parts.numels.size(), SymInt(0));
  const auto sent = splits_of_root(destination, input.sym_numel(), *resolved);
  const auto flat = call::all_to_all_single.traced(input.flatten().contiguous(), received, sent, group);
  if (!receives) {
    auto shape = input.sym_sizes().vec();
    shape[dim] = SymInt(0);
    return flat.view_symint(shape);
  }
  return parts.concatenated(flat.split_with_sizes_symint(received, 0));
}

// Scatters the root's gradient. The other ranks, whose gradients are empty, pass zeros of the full shape.
Tensors rule(const Tensors& gradients, const autograd::Values&, const autograd::Data& data) {
  const auto destination = data[0].toInt();
  const auto& group = data[2];
  const bool has_full_gradient = group_from_ivalue(group, kOp)->getRank() == destination;
  const auto full_gradient =
      has_full_gradient ? gradients[0] : autograd::zeros_after(gradients[0], data[4].toSymIntVector());
  return {call::scatter(full_gradient, destination, data[1].toInt(), group, autograd::SavedSizes(data[3]))};
}

autograd::Data saved(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                     Splits split_sizes) {
  auto full_sizes = input.sym_sizes().vec();
  auto& size = full_sizes[wrap_dim(dim, input, kOp)];
  size =
      split_sizes.has_value() ? sum(*split_sizes) : size * SymInt(group_from_ivalue(group, kOp)->getSize());
  return {destination, dim, group, autograd::saved_sizes(split_sizes), c10::SymIntArrayRef(full_sizes)};
}

}  // namespace
}  // namespace gather

StartedCollective start_gather(const at::Tensor& input, int64_t destination, int64_t dim,
                               const GroupPtr& group, at::OptionalIntArrayRef split_sizes) {
  const BelowAutograd below_autograd;
  check_dense(input, gather::kOp);
  check_has_dims(input, gather::kOp);
  check_rank(destination, *group, "dst", gather::kOp);
  const auto parts =
      Parts::of_shard(input.sizes(), wrap_dim(dim, input, gather::kOp), split_sizes, *group, gather::kOp);
  agree_if_checked(*group, gather::kOp, {input, parts.dim()}, "dst=", destination, ", dim=", parts.dim(),
                   ", sizes=", parts.sizes());
  const bool receives = group->getRank() == destination;
  auto sent = private_input(input).view(-1);
  const auto received = fresh_tensor(receives ? parts.full_numel() : 0, input);
  auto shape = parts.full_shape();
  if (!receives) {
    shape[parts.dim()] = 0;
  }
  const bool is_unpacked = receives && !parts.lie_in_order();
  const auto out = is_unpacked ? fresh_tensor(shape, input) : received.view(shape);
  auto work =
      exchange(sent, received, receives ? parts.numels() : splits_of_root(destination, int64_t{0}, *group),
               splits_of_root(destination, sent.numel(), *group), *group);
  if (!is_unpacked) {
    const bool has_result = receives;  // the others are not used
    return {gather::kOp, group, std::move(work), as_list(std::move(sent)), {out}, {}, has_result};
  }
  const auto unpack = [parts](const StartedCollective& start) {
    parts.unpack(start.buffers[1], 0, start.outputs[0]);
  };
  return {gather::kOp, group, std::move(work), {std::move(sent), received}, {out}, unpack};
}

const decltype(call::gather) call::gather(
    {.name = "gather"}, start_gather,
    {.meta = gather::meta, .traced = gather::traced, .rule = gather::rule, .saved = gather::saved});

}  // namespace funcol
