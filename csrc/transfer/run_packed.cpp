#include "transfer/run_packed.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/process_group.h"
#include "layout/tensor_meta.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "transfer/box_copies.h"
#include "transfer/op_names.h"

namespace funcol {
namespace {

using Steps = PackedExchanges;
using Blocks = std::vector<PeerBlock> PackedExchange::*;

// The parts of a flat buffer, one per rank, each with the blocks of all steps. Equal parts are as long as the
// longest.
struct Segments {
  Segments(const Steps& steps, Blocks blocks, bool are_equal) {
    std::vector<int64_t> totals(steps[0]->num_ranks);
    for (const auto& step : steps) {
      for (const auto& block : (*step).*blocks) {
        totals[block.rank] += block.copy.numel();
      }
    }
    const int64_t longest = *std::ranges::max_element(totals);
    for (const int64_t total : totals) {
      begins.push_back(num_elements);
      sizes.push_back(are_equal ? longest : total);
      num_elements += sizes.back();
    }
  }

  std::vector<int64_t> begins;
  std::vector<int64_t> sizes;
  int64_t num_elements = 0;
};

// Fills `flat` with the blocks of all tensors, and what is between them with zeros: padding is sent, and
// reduced, and must not be a number that was in the memory before.
template <typename Copies = BoxCopies>
void pack(const Steps& steps, const std::vector<at::Tensor>& tensors, const Segments& segments,
          const at::Tensor& flat) {
  Copies copies;
  auto begins = segments.begins;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto source = Copies::contiguous(tensors[i]);
    for (const auto& [rank, copy] : steps[i]->sent) {
      copies.add(copy, source, 0, flat, begins[rank]);
      begins[rank] += copy.numel();
    }
  }
  copies.flush();
  for (size_t rank = 0; rank < begins.size(); ++rank) {
    const bool is_last = rank + 1 == begins.size();
    const int64_t end = is_last ? flat.numel() : segments.begins[rank + 1];
    if (begins[rank] < end) {
      flat.narrow(0, begins[rank], end - begins[rank]).zero_();
    }
  }
}

// Fills `output` with the blocks of `step`, and moves `begins` past them.
template <typename Copies>
void unpack(const PackedExchange& step, const at::Tensor& flat, std::vector<int64_t>& begins,
            const at::Tensor& output, Copies& copies) {
  for (const auto& [rank, copy] : step.received) {
    copies.add(copy, flat, begins[rank], output, 0);
    begins[rank] += copy.numel();
  }
}

// Raises if agreement is checked and the ranks are about to move different tensors. Compares nothing for an
// exchange in pairs, of which other ranks of the group know nothing.
void agree_on(const Steps& steps, const at::Tensor& like, c10d::ProcessGroup& group, const char* op) {
  if (!agreement_is_checked() || steps[0]->in_pairs) {
    return;
  }
  std::vector<std::string> descriptions;
  descriptions.reserve(steps.size());
  for (const auto& step : steps) {
    descriptions.push_back(step->description);
  }
  agree(group, op, c10::Join(", ", descriptions), c10::str(like.scalar_type(), " on ", like.device().type()));
}

// The parts of the buffers of `steps`, of any kind but all_reduce.
struct Buffers {
  explicit Buffers(const Steps& steps)
      : gathers(steps[0]->kind == StepKind::kAllGather),
        scatters(steps[0]->kind == StepKind::kReduceScatter),
        sent(steps, &PackedExchange::sent, scatters),
        received(steps, &PackedExchange::received, gathers) {}

  bool gathers;
  bool scatters;
  Segments sent;
  Segments received;
};

// The start of the collective of `steps`, whose one output is the received buffer.
struct FlatStart {
  StartedCollective start;
  std::vector<int64_t> begins;  // by rank, of the blocks in the output
};

FlatStart start_flat(const Steps& steps, const std::vector<at::Tensor>& tensors, const GroupPtr& group,
                     at::Tensor* scratch = nullptr, const char* op = kRedistributeMany) {
  const auto& first = *steps[0];
  const auto& like = tensors[0];
  agree_on(steps, like, *group, op);
  const auto& [gathers, scatters, sent, received] = Buffers(steps);
  if (gathers) {
    const auto flat = fresh_tensor({received.num_elements}, like);
    const auto own = flat.narrow(0, received.begins[group->getRank()], received.sizes[0]);
    pack(steps, tensors, sent, own);
    return {start_all_gather_out(own, flat, group, op), received.begins};
  }
  at::Tensor own;
  auto& buffer = scratch != nullptr ? *scratch : own;
  if (!buffer.defined() || buffer.numel() < sent.num_elements || buffer.scalar_type() != like.scalar_type() ||
      buffer.device() != like.device()) {
    buffer = fresh_tensor({sent.num_elements}, like);
  }
  const auto flat = buffer.narrow(0, 0, sent.num_elements);
  pack(steps, tensors, sent, flat);
  if (scatters) {
    const auto reduce_op = reduce_op_from_name(first.reduce_op, op);
    return {start_reduce_scatter(flat, reduce_op, 0, group), received.begins};
  }
  auto start = first.in_pairs ? start_exchange_in_pairs(flat, received.sizes, sent.sizes, group)
                              : start_all_to_all(flat, received.sizes, sent.sizes, group);
  return {std::move(start), received.begins};
}

// Returns true if the received buffer is the new tensor of its sole step.
bool lies_in_order(const PackedExchange& step, const std::vector<int64_t>& begins) {
  int64_t filled = 0;
  for (const auto& [rank, copy] : step.received) {
    if (copy.numel() > 0 && (begins[rank] != filled || copy.place() != filled)) {
      return false;
    }
    filled += copy.numel();
  }
  return true;
}

}  // namespace

FlatResults::FlatResults(Steps steps, const std::vector<at::Tensor>& tensors) : steps_(std::move(steps)) {
  const BelowAutograd below_autograd;
  const auto& first = *steps_[0];
  const auto group = group_from_ivalue(first.group, kRedistributeMany);
  if (first.kind == StepKind::kAllReduce) {
    const auto reduce_op = reduce_op_from_name(first.reduce_op, kRedistributeMany);
    received_ = as_pending(start_all_reduce_coalesced(tensors, reduce_op, group));
    return;
  }
  auto flat = start_flat(steps_, tensors, group);
  flat.start.is_counted = false;
  begins_ = std::move(flat.begins);
  received_ = as_pending(std::move(flat.start));
}

at::Tensor FlatResults::next() {
  if (num_made_ == steps_.size()) {
    return {};
  }
  const BelowAutograd below_autograd;
  const auto& step = *steps_[num_made_++];
  if (step.kind == StepKind::kAllReduce) {
    auto reduced = std::move(received_[num_made_ - 1]);
    settle(reduced);
    return reduced;
  }
  auto& flat = received_[0];
  settle(flat);
  const bool fills_buffer = steps_.size() == 1 && flat.numel() == num_elements(step.shape_after);
  if (fills_buffer && lies_in_order(step, begins_)) {
    return std::exchange(flat, at::Tensor()).view(step.shape_after);
  }
  auto result = fresh_tensor(step.shape_after, flat);
  BoxCopies copies;
  unpack(step, flat, begins_, result, copies);
  copies.flush();
  if (num_made_ == steps_.size()) {
    flat.reset();
  }
  return result;
}

StartedCollective start_together(Steps steps, std::vector<at::Tensor> tensors, at::Tensor* scratch,
                                 const char* op) {
  const BelowAutograd below_autograd;
  const auto& first = *steps[0];
  std::vector<at::Tensor> outputs;
  bool has_results = false;
  BoxCopies kept;
  for (size_t i = 0; i < steps.size() && first.kind != StepKind::kAllReduce; ++i) {
    outputs.push_back(fresh_tensor(steps[i]->shape_after, tensors[i]));
    has_results = has_results || outputs.back().numel() > 0;
    if (steps[i]->kept.has_value()) {
      tensors[i] = BoxCopies::contiguous(tensors[i]);
      kept.add(*steps[i]->kept, tensors[i], 0, outputs.back(), 0);
    }
  }
  kept.flush();
  if (std::ranges::none_of(steps, [](const auto& step) { return step->communicates; })) {
    return {op, {}, {}, {}, std::move(outputs), {}};
  }
  const auto group = group_from_ivalue(first.group, op);
  if (first.kind == StepKind::kAllReduce) {
    return start_all_reduce_coalesced(tensors, reduce_op_from_name(first.reduce_op, op), group);
  }
  auto [start, begins] = start_flat(steps, tensors, group, scratch, op);
  start.buffers.push_back(std::move(start.outputs[0]));
  start.outputs = std::move(outputs);
  start.is_counted = has_results;
  start.epilogue = [steps = std::move(steps), begins = std::move(begins)](const StartedCollective& done) {
    BoxCopies copies;
    auto places = begins;
    for (size_t i = 0; i < steps.size(); ++i) {
      unpack(*steps[i], done.buffers.back(), places, done.outputs[i], copies);
    }
    copies.flush();
  };
  return std::move(start);
}

std::vector<at::Tensor> run_together(const Steps& steps, const std::vector<at::Tensor>& tensors) {
  const auto& first = *steps[0];
  if (first.kind == StepKind::kAllReduce) {
    return call::all_reduce_coalesced(tensors, first.reduce_op, first.group);
  }
  const auto& [gathers, scatters, sent, received] = Buffers(steps);
  const auto flat = tensors[0].new_empty({gathers ? received.sizes[0] : sent.num_elements});
  pack<OperatorCopies>(steps, tensors, sent, flat);
  const auto moved = gathers    ? call::all_gather_along_dim(flat, 0, first.group, {})
                     : scatters ? call::reduce_scatter_along_dim(flat, first.reduce_op, 0, first.group, {})
                                : call::all_to_all_single(flat, c10::fromIntArrayRefSlow(received.sizes),
                                                          c10::fromIntArrayRefSlow(sent.sizes), first.group);
  std::vector<at::Tensor> outputs;
  OperatorCopies copies;
  auto begins = received.begins;
  for (const auto& step : steps) {
    outputs.push_back(moved.new_empty(step->shape_after));
    unpack(*step, moved, begins, outputs.back(), copies);
  }
  return outputs;
}

}  // namespace funcol
