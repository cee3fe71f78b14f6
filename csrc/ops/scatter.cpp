// scatter: an exchange in which the source alone sends. A backend moves as many bytes as in a scatter of its
// own, and parts may differ in size.
#include <ATen/ops/cat.h>

#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/meta.h"
#include "ops/parts.h"

namespace funcol {
namespace scatter {
namespace {

using c10::IValue;
using c10::SymInt;
using Splits = at::OptionalSymIntArrayRef;
using Tensors = std::vector<at::Tensor>;

constexpr auto kOp = "scatter";

at::Tensor meta(const at::Tensor& input, int64_t source, int64_t dim, const IValue& group,
                Splits split_sizes) {
  const auto resolved = group_from_ivalue(group, kOp);
  check_rank(source, *resolved, "src", kOp);
  return meta_of_own_part(input, dim, *resolved, split_sizes, kOp);
}

at::Tensor traced(const at::Tensor& input, int64_t source, int64_t dim, const IValue& group,
                  Splits split_sizes) {
  const auto resolved = group_from_ivalue(group, kOp);
  check_has_dims(input, kOp);
  check_rank(source, *resolved, "src", kOp);
  dim = wrap_dim(dim, input, kOp);
  const auto rank = resolved->getRank();
  const auto sizes = sizes_of_parts(input.sym_size(dim), dim, split_sizes, *resolved, kOp);
  SymSizes sent;
  Tensors flat_parts;
  for (const auto& part : input.split_with_sizes_symint(sizes, dim)) {
    flat_parts.push_back(part.flatten());
    sent.push_back(rank == source ? flat_parts.back().sym_numel() : SymInt(0));
  }
  auto shape = input.sym_sizes().vec();
  shape[dim] = sizes[rank];
  const auto received = splits_of_root(source, flat_parts[rank].sym_numel(), *resolved);
  auto flat = at::cat(flat_parts);
  if (rank != source) {
    flat = flat.narrow(0, 0, 0);
  }
  return call::all_to_all_single.traced(flat.contiguous(), received, sent, group).view_symint(shape);
}

Tensors rule(const Tensors& gradients, const autograd::Values&, const autograd::Data& data) {
  const auto source = data[0].toInt();
  const auto& group = data[2];
  const auto gathered =
      call::gather(gradients[0], source, data[1].toInt(), group, autograd::SavedSizes(data[3]));
  const bool is_source = group_from_ivalue(group, kOp)->getRank() == source;
  return {is_source ? gathered : autograd::zeros_after(gathered, data[4].toSymIntVector())};
}

}  // namespace
}  // namespace scatter

StartedCollective start_scatter(const at::Tensor& input, int64_t source, int64_t dim, const GroupPtr& group,
                                at::OptionalIntArrayRef split_sizes) {
  const BelowAutograd below_autograd;
  check_dense(input, scatter::kOp);
  check_has_dims(input, scatter::kOp);
  check_rank(source, *group, "src", scatter::kOp);
  const auto parts =
      Parts::of_full(input.sizes(), wrap_dim(dim, input, scatter::kOp), split_sizes, *group, scatter::kOp);
  agree_if_checked(*group, scatter::kOp, input, "src=", source, ", dim=", parts.dim(),
                   ", sizes=", parts.sizes());
  const auto rank = group->getRank();
  const bool sends = rank == source;
  if (sends) {
    settle(input);
  }
  auto sent = sends ? parts.pack(input) : fresh_tensor(0, input);
  auto out = fresh_tensor(parts.shape(rank), input);
  auto work = exchange(sent, out.view(-1), splits_of_root(source, parts.numel(rank), *group),
                       sends ? parts.numels() : splits_of_root(source, int64_t{0}, *group), *group);
  return {scatter::kOp, group, std::move(work), as_list(std::move(sent)), as_list(std::move(out)), {}};
}

const decltype(call::scatter) call::scatter({.name = "scatter"}, start_scatter,
                                            {.meta = scatter::meta,
                                             .traced = scatter::traced,
                                             .rule = scatter::rule,
                                             .saved = decltype(call::scatter)::arguments_and_sizes});

}  // namespace funcol
