#include <c10/util/accumulate.h>

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
#include "ops/parts.h"

namespace funcol {
namespace all_to_all {
namespace {

using c10::IValue;
using c10::SymIntArrayRef;

constexpr auto kOp = "all_to_all_single";

at::Tensor meta(const at::Tensor& input, SymIntArrayRef output_splits, SymIntArrayRef, const IValue&) {
  auto sizes = input.sym_sizes().vec();
  if (!output_splits.empty()) {
    sizes.at(0) = sum(output_splits);
  }
  return meta_of_sizes(input, sizes);
}

at::Tensor traced(const at::Tensor& input, SymIntArrayRef output_splits, SymIntArrayRef input_splits,
                  const IValue& group) {
  const auto received =
      core::call_and_wait(kOp, {core::as_pairs(input), output_splits, input_splits, group}).toTensor();
  return core::from_pairs(received, input);
}

std::vector<at::Tensor> rule(const std::vector<at::Tensor>& gradients, const autograd::Values&,
                             const autograd::Data& data) {
  const auto output_splits = data[0].toSymIntVector();
  const auto input_splits = data[1].toSymIntVector();
  const auto sent = GradientCollectives::unshared(gradients[0]);
  return {call::all_to_all_single(sent, input_splits, output_splits, data[2])};
}

}  // namespace
}  // namespace all_to_all

c10::intrusive_ptr<c10d::Work> exchange(const at::Tensor& source, const at::Tensor& out,
                                        std::vector<int64_t> output_splits, std::vector<int64_t> input_splits,
                                        c10d::ProcessGroup& group) {
  auto wire_in = wire_for_movement(source, group);
  auto wire_out = wire_for_movement(out, group);
  return on_backend(group, source.device().type(), [&](auto& target) {
    return compat::all_to_all_flat(target, wire_out, wire_in, output_splits, input_splits, {});
  });
}

void check_all_to_all(const at::Tensor& input, at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                      const c10d::ProcessGroup& group) {
  check_dense(input, all_to_all::kOp);
  TORCH_CHECK_VALUE(input.dim() > 0, "funcol::", all_to_all::kOp,
                    ": a 0-dim tensor has no rows to send. Pass one with dims.");
  TORCH_CHECK_VALUE(output_splits.empty() == input_splits.empty(), "funcol::", all_to_all::kOp,
                    ": output_split_sizes is ", output_splits, " and input_split_sizes is ", input_splits,
                    ". Pass both, or neither for equal shares.");
  if (output_splits.empty()) {
    TORCH_CHECK_VALUE(input.size(0) % group.getSize() == 0, "funcol::", all_to_all::kOp, ": dim 0 has size ",
                      input.size(0), ", not divisible by the ", group.getSize(), " ranks of group '",
                      group_name(group), "'. Pass output_split_sizes and input_split_sizes.");
    return;
  }
  check_split_sizes(c10::fromIntArrayRefSlow(output_splits), "output_split_sizes", group, all_to_all::kOp);
  check_split_sizes(c10::fromIntArrayRefSlow(input_splits), "input_split_sizes", group, all_to_all::kOp);
  TORCH_CHECK_VALUE(c10::sum_integers(input_splits) == input.size(0), "funcol::", all_to_all::kOp,
                    ": input_split_sizes ", input_splits, " sum up to ", c10::sum_integers(input_splits),
                    ", but dim 0 of the input has size ", input.size(0), ". They must be equal.");
  check_own_splits(output_splits, input_splits, group, all_to_all::kOp);
}

StartedCollective start_all_to_all(const at::Tensor& input, at::IntArrayRef output_splits,
                                   at::IntArrayRef input_splits, const GroupPtr& group) {
  const BelowAutograd below_autograd;
  const int64_t num_ranks = group->getSize();
  check_all_to_all(input, output_splits, input_splits, *group);
  std::vector<int64_t> equal_shares;
  if (output_splits.empty()) {
    equal_shares.assign(num_ranks, input.size(0) / num_ranks);
    output_splits = input_splits = equal_shares;
  }
  agree_on_exchange_if_checked(*group, all_to_all::kOp, input, output_splits, input_splits);
  auto source = contiguous_input(input);
  auto sizes = source.sizes().vec();
  sizes[0] = c10::sum_integers(output_splits);
  auto out = fresh_tensor(sizes, source);
  auto work = exchange(source, out, output_splits.vec(), input_splits.vec(), *group);
  return {all_to_all::kOp, group, std::move(work), as_list(std::move(source)), as_list(std::move(out)), {}};
}

StartedCollective start_all_to_all_dims(const at::Tensor& input, int64_t split_dim, int64_t concat_dim,
                                        bool stacks, const GroupPtr& group) {
  const BelowAutograd below_autograd;
  check_dense(input, all_to_all::kOp);
  const int64_t num_ranks = group->getSize();
  auto sizes = input.sizes().vec();
  sizes[split_dim] /= num_ranks;
  if (stacks) {
    sizes.erase(sizes.begin() + split_dim);
    sizes.insert(sizes.begin() + concat_dim, 1);
  }
  sizes[concat_dim] *= num_ranks;
  settle(input);
  const auto source = (is_rank_major(input.sizes(), split_dim) ? contiguous_input(input)
                                                               : split_shards(input, num_ranks, split_dim))
                          .view(-1);
  const std::vector<int64_t> splits(num_ranks, source.numel() / num_ranks);
  agree_on_exchange_if_checked(*group, all_to_all::kOp, source, splits, splits);
  auto received = fresh_tensor(source.sizes(), source);
  const bool is_merged = !is_rank_major(sizes, concat_dim);
  auto merged = is_merged ? fresh_tensor(sizes, source) : at::Tensor();
  auto work = exchange(source, received, splits, splits, *group);
  if (!is_merged) {
    auto out = in_shape(std::move(received), sizes);
    return {all_to_all::kOp, group, std::move(work), {source}, as_list(std::move(out)), {}};
  }
  const auto merge = [num_ranks, concat_dim](const StartedCollective& start) {
    merge_shards(start.buffers[1], start.outputs[0], num_ranks, concat_dim);
  };
  return {all_to_all::kOp, group, std::move(work), {source, received}, as_list(std::move(merged)), merge};
}

const decltype(call::all_to_all_single) call::all_to_all_single(
    {.name = "all_to_all_single"}, start_all_to_all,
    {.meta = all_to_all::meta, .traced = all_to_all::traced, .rule = all_to_all::rule, .is_in_core = true});

}  // namespace funcol
