#include "ops/in_place.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "async/pending_collective.h"
#include "comm/orphaned_works.h"
#include "comm/process_group.h"
#include "compat/autograd_node.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/gradient.h"

namespace funcol {
namespace {

using at::Tensor;
using at::TensorList;
using autograd::RuleNode;
using c10::IValue;
using Tensors = std::vector<Tensor>;

// Returns true if a backend may write into `out`, and only autograd has to be notified.
bool is_writable(const Tensor& out) {
  return is_plain_in_memory(out) && !out.is_meta() && !out.is_nested() &&
         !out._fw_grad(/*level=*/0).defined() && (!out.is_inference() || c10::InferenceMode::is_enabled());
}

// Returns true if data of `input` may be received into `out` without a conversion.
bool can_receive(const Tensor& out, const Tensor& input) {
  return input.layout() == at::kStrided && out.dtype() == input.dtype() && out.device() == input.device() &&
         out.storage().data() != input.storage().data();
}

// Returns true if a backend may write results of `sources`, and their history, into all of `outs`.
bool are_destinations(TensorList outs, TensorList sources) {
  return std::ranges::all_of(outs, [&](const Tensor& out) {
    return is_writable(out) && !autograd::needs_gradient(out) &&
           std::ranges::all_of(sources, [&](const Tensor& source) { return can_receive(out, source); });
  });
}

// Returns true if the gradients of `sources` are not made of those of the results alone.
bool needs_values(TensorList sources, const c10d::ReduceOp& reduce_op) {
  return autograd::depends_on_values(reduce_op) && autograd::needs_gradient(sources);
}

// Runs the collective of `start`, which reads `sources` and overwrites `outs`; `rule` makes the gradients,
// from the data of `make_data`. Returns false for recorded views: they share a history, so a node is not
// enough.
template <typename StartCollective, typename MakeData>
bool run(TensorList outs, TensorList sources, const char* op, const StartCollective& start,
         RuleNode::Rule rule, const MakeData& make_data) {
  const bool is_recorded = autograd::needs_gradient(sources);
  if (is_recorded && std::any_of(outs.begin(), outs.end(), [](const Tensor& out) { return out.is_view(); })) {
    return false;
  }
  decltype(compat::make_node<RuleNode>(op, rule, make_data())) node;
  if (is_recorded) {
    node = compat::make_node<RuleNode>(op, rule, make_data());
    // This comes before anything is written, since sources may be.
    node->set_next_edges(torch::autograd::collect_next_edges(sources));
  }
  sweep_some_orphans();
  auto started = start();
  started.is_counted = false;  // it is being waited for
  c10::make_intrusive<PendingCollective>(std::move(started))->settle();
  note_written(outs);
  if (node) {
    torch::autograd::rebase_history(outs.vec(), node);
  }
  return true;
}

// Returns `tensor`, flattened unless dim 0 can be cut into `num_parts`.
Tensor in_parts(const Tensor& tensor, int64_t num_parts) {
  return tensor.dim() > 0 && tensor.size(0) % num_parts == 0 ? tensor : tensor.reshape(-1);
}

Tensor shaped(const Tensor& tensor, at::IntArrayRef sizes) {
  return tensor.sizes() == sizes ? tensor : tensor.view(sizes);
}

Tensor joined(TensorList tensors) { return tensors[0].dim() == 0 ? at::stack(tensors) : at::cat(tensors); }

// Reverses joined().
Tensors cut(const Tensor& tensor, bool into_scalars, int64_t num_parts) {
  if (into_scalars) {
    return tensor.unbind();
  }
  return tensor.split_with_sizes(std::vector<int64_t>(num_parts, tensor.size(0) / num_parts));
}

// The rules of gathers and scatters. The functions below make their data.

Tensors all_gather_rule(const Tensors& gradients, const RuleNode::Values&, const RuleNode::Data& data) {
  const auto& group = data[1];
  const auto num_ranks = group_from_ivalue(group, "all_gather_into_tensor")->getSize();
  const auto gradient = gradients.size() == 1
                            ? in_parts(GradientCollectives::unshared(gradients[0]), num_ranks)
                            : joined(gradients);
  return {shaped(call::reduce_scatter_along_dim(gradient, "sum", 0, group, {}), data[0].toIntVector())};
}

Tensor full_gradient(const Tensor& part, const IValue& reduce_op, const IValue& group) {
  constexpr auto kOp = "reduce_scatter_tensor";
  const auto weighted = autograd::weighted(GradientCollectives::unshared(part), reduce_op, group, kOp);
  const auto gathered = call::all_gather_along_dim(weighted, 0, group, {});
  return autograd::reduction_gradient(gathered, {}, {}, reduce_op, group, kOp);
}

Tensors reduce_scatter_rule(const Tensors& gradients, const RuleNode::Values&, const RuleNode::Data& data) {
  return {shaped(full_gradient(gradients[0], data[0], data[1]), data[2].toIntVector())};
}

Tensors reduce_scatter_list_rule(const Tensors& gradients, const RuleNode::Values&,
                                 const RuleNode::Data& data) {
  const auto num_parts = group_from_ivalue(data[1], "reduce_scatter_tensor")->getSize();
  return cut(full_gradient(gradients[0], data[0], data[1]), gradients[0].dim() == 0, num_parts);
}

}  // namespace

bool all_reduce_into(const Tensor& tensor, const c10d::ReduceOp& reduce_op, const GroupPtr& group) {
  constexpr auto kOp = "all_reduce";
  torch::autograd::check_inplace(tensor, autograd::needs_gradient(tensor));
  if (!is_writable(tensor) || needs_values(tensor, reduce_op)) {
    return false;
  }
  return run(
      tensor, tensor, kOp, [&] { return start_all_reduce_(tensor, reduce_op, group, kOp); },
      call::all_reduce.rule(),
      [&] {
        return RuleNode::Data{as_ivalue(reduce_op), as_ivalue(group)};
      });
}

bool broadcast_into(const Tensor& tensor, int64_t source, const GroupPtr& group) {
  constexpr auto kOp = "broadcast";
  torch::autograd::check_inplace(tensor, autograd::needs_gradient(tensor));
  if (!is_writable(tensor)) {
    return false;
  }
  return run(
      tensor, tensor, kOp, [&] { return start_broadcast_(tensor, source, group, kOp); },
      call::broadcast.rule(),
      [&] {
        return RuleNode::Data{source, as_ivalue(group)};
      });
}

bool all_gather_into(const Tensor& out, const Tensor& input, const GroupPtr& group) {
  constexpr auto kOp = "all_gather_into_tensor";
  if (!are_destinations(out, input)) {
    return false;
  }
  return run(
      out, input, kOp, [&] { return start_all_gather_out(input, out, group, kOp); }, all_gather_rule,
      [&] {
        return RuleNode::Data{input.sizes(), as_ivalue(group)};
      });
}

bool reduce_scatter_into(const Tensor& out, const Tensor& input, const c10d::ReduceOp& reduce_op,
                         const GroupPtr& group) {
  constexpr auto kOp = "reduce_scatter_tensor";
  if (!are_destinations(out, input) || needs_values(input, reduce_op)) {
    return false;
  }
  return run(
      out, input, kOp,
      [&] {
        const BelowAutograd below_autograd;
        return start_reduce_scatter_out(in_parts(input, group->getSize()), reduce_op, out, group, kOp);
      },
      reduce_scatter_rule,
      [&] {
        return RuleNode::Data{as_ivalue(reduce_op), as_ivalue(group), input.sizes()};
      });
}

bool all_gather_into_list(TensorList outs, const Tensor& input, const GroupPtr& group) {
  if (!are_destinations(outs, input)) {
    return false;
  }
  return run(
      outs, input, "all_gather", [&] { return start_all_gather_into_list(outs, input, group); },
      all_gather_rule,
      [&] {
        return RuleNode::Data{input.sizes(), as_ivalue(group)};
      });
}

bool reduce_scatter_list_into(const Tensor& out, TensorList inputs, const c10d::ReduceOp& reduce_op,
                              const GroupPtr& group) {
  constexpr auto kOp = "reduce_scatter_tensor";
  if (!are_destinations(out, inputs) || needs_values(inputs, reduce_op)) {
    return false;
  }
  return run(
      out, inputs, kOp,
      [&] {
        const BelowAutograd below_autograd;
        return start_reduce_scatter_out(joined(inputs), reduce_op, out, group, kOp);
      },
      reduce_scatter_list_rule,
      [&] {
        return RuleNode::Data{as_ivalue(reduce_op), as_ivalue(group)};
      });
}

}  // namespace funcol
