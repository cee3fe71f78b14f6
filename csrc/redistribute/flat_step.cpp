#include "redistribute/flat_step.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "async/async_tensor.h"
#include "ops/wire.h"

namespace funcol {
namespace {

using Steps = std::vector<std::shared_ptr<const FlatStep>>;
using Blocks = std::vector<BoxCopy> FlatStep::*;

constexpr auto kOp = "redistribute_many";

BoxCopy whole_copy(const std::vector<int64_t>& shape) { return {whole_runs(shape), shape, shape}; }

std::vector<Run> reversed(std::vector<Run> runs) {
  for (auto& run : runs) {
    std::swap(run.from, run.to);
  }
  return runs;
}

// Calls visit(shape, runs from the whole tensor) for the shard of each rank.
template <typename Visit>
void for_each_shard(int64_t dim, const std::vector<Intervals>& shards,
                    const std::vector<int64_t>& whole_shape, const Visit& visit) {
  for (const auto& positions : shards) {
    auto shape = whole_shape;
    shape[dim] = num_indices(positions);
    visit(shape, runs_to_shard(positions));
  }
}

BoxCopy nothing() { return {std::vector<std::vector<Run>>(1), {0}, {0}}; }

// The copy from the block of `rank`, which has these cuts, to the new tensor.
BoxCopy received_block(const Exchange& exchange, const std::vector<int64_t>& cuts, int64_t rank) {
  std::vector<std::vector<Run>> runs;
  for (size_t dim = 0; dim < exchange.pieces.size(); ++dim) {
    runs.emplace_back();
    int64_t filled = 0;
    for (const auto& piece : exchange.pieces[dim]) {
      if (piece.cut == cuts[dim]) {
        runs.back().push_back({piece.positions.begin, filled, piece.positions.size});
      }
      filled += piece.positions.size;
    }
  }
  return {std::move(runs), exchange.received[rank].shape, exchange.shape_after};
}

// The parts of a flat buffer, one a rank, each with the blocks of all steps. Equal ones are as long as the
// longest.
struct Segments {
  Segments(const Steps& steps, Blocks blocks, bool are_equal) {
    std::vector<int64_t> totals;
    for (const auto& step : steps) {
      const auto& of_step = (*step).*blocks;
      totals.resize(of_step.size());
      for (size_t rank = 0; rank < of_step.size(); ++rank) {
        totals[rank] += of_step[rank].numel();
      }
    }
    const int64_t longest = *std::ranges::max_element(totals);
    for (const int64_t total : totals) {
      begins.push_back(num_elements);
      sizes.push_back(are_equal ? longest : total);
      is_padded = is_padded || sizes.back() != total;
      num_elements += sizes.back();
    }
  }

  std::vector<int64_t> begins;
  std::vector<int64_t> sizes;
  int64_t num_elements = 0;
  bool is_padded = false;
};

at::Tensor pack(const Steps& steps, const std::vector<at::Tensor>& tensors, Segments segments, int64_t size) {
  const auto& like = tensors[0];
  // Padding is sent, and reduced: it must not be a number that was in the memory before.
  const bool is_padded = segments.is_padded || size != segments.num_elements;
  auto flat = is_padded ? at::zeros({size}, like.options()) : fresh_tensor({size}, like);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto source = contiguous_input(tensors[i]);
    for (size_t rank = 0; rank < steps[i]->sent.size(); ++rank) {
      const auto& block = steps[i]->sent[rank];
      block.run(source, 0, flat, segments.begins[rank]);
      segments.begins[rank] += block.numel();
    }
  }
  return flat;
}

void unpack(const Steps& steps, const at::Tensor& flat, std::vector<int64_t> begins,
            const std::vector<at::Tensor>& outputs) {
  for (size_t i = 0; i < steps.size(); ++i) {
    for (size_t rank = 0; rank < steps[i]->received.size(); ++rank) {
      const auto& block = steps[i]->received[rank];
      block.run(flat, begins[rank], outputs[i], 0);
      begins[rank] += block.numel();
    }
  }
}

}  // namespace

std::string FlatStep::signature() const { return c10::str(to_string(kind), " ", reduce_op, " ", group); }

FlatStep flat_all_gather(c10::IValue group, int64_t dim, const std::vector<Intervals>& shards,
                         std::vector<int64_t> whole_shape, int64_t own_rank) {
  FlatStep step{StepKind::kAllGather, std::move(group), "", {}, {}, std::move(whole_shape)};
  for_each_shard(dim, shards, step.shape_after, [&](const auto& shape, auto to_shard) {
    if (static_cast<int64_t>(step.received.size()) == own_rank) {
      step.sent.push_back(whole_copy(shape));
    }
    auto runs = whole_runs(shape);
    runs[dim] = reversed(std::move(to_shard));
    step.received.emplace_back(std::move(runs), shape, step.shape_after);
  });
  return step;
}

FlatStep flat_reduce_scatter(c10::IValue group, std::string reduce_op, int64_t dim,
                             const std::vector<Intervals>& shards, std::vector<int64_t> whole_shape,
                             int64_t own_rank) {
  FlatStep step{StepKind::kReduceScatter, std::move(group), std::move(reduce_op), {}, {}, {}};
  for_each_shard(dim, shards, whole_shape, [&](const auto& shape, auto to_shard) {
    if (static_cast<int64_t>(step.sent.size()) == own_rank) {
      step.received.push_back(whole_copy(shape));
      step.shape_after = shape;
    }
    auto runs = whole_runs(shape);
    runs[dim] = std::move(to_shard);
    step.sent.emplace_back(std::move(runs), whole_shape, shape);
  });
  return step;
}

FlatStep flat_all_reduce(c10::IValue group, std::string reduce_op) {
  return {StepKind::kAllReduce, std::move(group), std::move(reduce_op), {}, {}, {}};
}

FlatStep flat_all_to_all(c10::IValue group, const Exchange& exchange) {
  FlatStep step{StepKind::kAllToAll, std::move(group), "", {}, {}, exchange.shape_after};
  const auto num_ranks = static_cast<int64_t>(exchange.sent.size());
  step.received.assign(num_ranks, nothing());
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const auto& sent = exchange.sent[rank];
    step.sent.push_back(sent.numel == 0 ? nothing() : selection_copy(sent.selection, exchange.shape_before));
  }
  for (size_t block = 0; block < exchange.sources.size(); ++block) {
    const int64_t rank = exchange.sources[block];
    if (exchange.received[rank].numel > 0) {
      step.received[rank] = received_block(exchange, exchange.cuts_of(block), rank);
    }
  }
  return step;
}

Start start_together(Steps steps, const std::vector<at::Tensor>& tensors) {
  const BelowAutograd below_autograd;
  const auto& first = *steps[0];
  const auto group = group_from_ivalue(first.group, kOp);
  if (first.kind == StepKind::kAllReduce) {
    return start_all_reduce_coalesced(tensors, reduce_op_from_name(first.reduce_op, kOp), group);
  }
  const bool gathers = first.kind == StepKind::kAllGather;
  const bool scatters = first.kind == StepKind::kReduceScatter;
  const Segments sent(steps, &FlatStep::sent, scatters);
  const Segments received(steps, &FlatStep::received, gathers);
  std::vector<at::Tensor> outputs;
  for (const auto& step : steps) {
    outputs.push_back(fresh_tensor(step->shape_after, tensors[0]));
  }
  auto start = [&]() -> Start {
    if (gathers) {
      return start_all_gather(pack(steps, tensors, sent, received.sizes[0]), 0, group);
    }
    const auto flat = pack(steps, tensors, sent, sent.num_elements);
    if (scatters) {
      return start_reduce_scatter(flat, reduce_op_from_name(first.reduce_op, kOp), 0, group);
    }
    return start_all_to_all(flat, received.sizes, sent.sizes, group);
  }();
  start.buffers.push_back(std::move(start.outputs[0]));
  start.outputs = std::move(outputs);
  start.epilogue = [steps = std::move(steps), begins = received.begins](const Start& done) {
    unpack(steps, done.buffers.back(), begins, done.outputs);
  };
  return start;
}

}  // namespace funcol
