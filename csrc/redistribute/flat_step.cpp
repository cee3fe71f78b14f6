#include "redistribute/flat_step.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "async/async_tensor.h"
#include "layout/tensor_meta.h"
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
      num_elements += sizes.back();
    }
  }

  std::vector<int64_t> begins;
  std::vector<int64_t> sizes;
  int64_t num_elements = 0;
};

// Fills `flat` with the blocks of all tensors, and what is between them with zeros: padding is sent, and
// reduced, and must not be a number that was in the memory before.
void pack(const Steps& steps, const std::vector<at::Tensor>& tensors, const Segments& segments,
          const at::Tensor& flat) {
  auto begins = segments.begins;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto source = contiguous_input(tensors[i]);
    for (size_t rank = 0; rank < steps[i]->sent.size(); ++rank) {
      const auto& block = steps[i]->sent[rank];
      block.run(source, 0, flat, begins[rank]);
      begins[rank] += block.numel();
    }
  }
  for (size_t rank = 0; rank < begins.size(); ++rank) {
    const bool is_last = rank + 1 == begins.size();
    const int64_t end = is_last ? flat.numel() : segments.begins[rank + 1];
    if (begins[rank] < end) {
      flat.narrow(0, begins[rank], end - begins[rank]).zero_();
    }
  }
}

// Fills `output` with the blocks of `step`, and moves `begins` behind them.
void unpack(const FlatStep& step, const at::Tensor& flat, std::vector<int64_t>& begins,
            const at::Tensor& output) {
  for (size_t rank = 0; rank < step.received.size(); ++rank) {
    const auto& block = step.received[rank];
    block.run(flat, begins[rank], output, 0);
    begins[rank] += block.numel();
  }
}

// An exchange among `peers`, ranks of a larger group. What a rank has for itself is copied.
Start start_between_peers(const std::vector<int64_t>& peers, const at::Tensor& sent, const Segments& to,
                          const at::Tensor& received, const Segments& from, const GroupPtr& group) {
  std::vector<std::string> kinds;
  std::vector<int64_t> others;
  std::vector<at::Tensor> tensors;
  const auto add = [&](const char* kind, int64_t peer, at::Tensor tensor) {
    if (tensor.numel() > 0) {
      kinds.emplace_back(kind);
      others.push_back(peer);
      tensors.push_back(std::move(tensor));
    }
  };
  for (size_t i = 0; i < peers.size(); ++i) {
    const auto block = sent.narrow(0, to.begins[i], to.sizes[i]);
    const auto place = received.narrow(0, from.begins[i], from.sizes[i]);
    if (peers[i] == group->getRank()) {
      place.copy_(block);
      continue;
    }
    add("isend", peers[i], block);
    add("irecv", peers[i], place);
  }
  auto start = start_batch_p2p(kinds, others, std::vector<int64_t>(others.size(), 0), tensors, group);
  start.buffers.push_back(sent);
  start.outputs = {received};
  return start;
}

// The start of the collective of `steps`, whose one output is what is received.
struct FlatStart {
  Start start;
  std::vector<int64_t> begins;  // by rank, of the blocks in the output
};

FlatStart start_flat(const Steps& steps, const std::vector<at::Tensor>& tensors, const GroupPtr& group) {
  const auto& first = *steps[0];
  const auto& like = tensors[0];
  const bool gathers = first.kind == StepKind::kAllGather;
  const bool scatters = first.kind == StepKind::kReduceScatter;
  const Segments sent(steps, &FlatStep::sent, scatters);
  const Segments received(steps, &FlatStep::received, gathers);
  if (gathers) {
    const auto flat = fresh_tensor({received.num_elements}, like);
    const auto own = flat.narrow(0, received.begins[group->getRank()], received.sizes[0]);
    pack(steps, tensors, sent, own);
    return {start_all_gather_out(own, flat, group, kOp), received.begins};
  }
  const auto flat = fresh_tensor({sent.num_elements}, like);
  pack(steps, tensors, sent, flat);
  if (scatters) {
    const auto reduce_op = reduce_op_from_name(first.reduce_op, kOp);
    return {start_reduce_scatter(flat, reduce_op, 0, group), received.begins};
  }
  if (!first.peers.empty()) {
    const auto buffer = fresh_tensor({received.num_elements}, like);
    return {start_between_peers(first.peers, flat, sent, buffer, received, group), received.begins};
  }
  return {start_all_to_all(flat, received.sizes, sent.sizes, group), received.begins};
}

// Whether the received buffer is the new tensor of its sole step.
bool lies_in_order(const FlatStep& step, const std::vector<int64_t>& begins) {
  int64_t filled = 0;
  for (size_t rank = 0; rank < step.received.size(); ++rank) {
    const auto& block = step.received[rank];
    if (block.numel() == 0) {
      continue;
    }
    if (begins[rank] != filled || block.place() != filled) {
      return false;
    }
    filled += block.numel();
  }
  return true;
}

// A tensor without dims copies as one of shape (1).
std::vector<int64_t> with_dims(std::vector<int64_t> shape) {
  if (shape.empty()) {
    shape.push_back(1);
  }
  return shape;
}

// By dim, the runs from the shard of the rank at `coordinate` to the whole, and the shard's shape.
struct ShardRuns {
  ShardRuns(const HolderStep& step, const Coordinate& coordinate) {
    const auto whole = with_dims(step.shape);
    for (size_t dim = 0; dim < whole.size(); ++dim) {
      const auto held =
          local_indices(step.layout, step.mesh, static_cast<int64_t>(dim), whole[dim], coordinate);
      from_whole.push_back(runs_to_shard(held));
      to_whole.push_back(reversed(from_whole.back()));
      shape.push_back(num_indices(held));
    }
  }

  std::vector<std::vector<Run>> from_whole;
  std::vector<std::vector<Run>> to_whole;
  std::vector<int64_t> shape;
};

// Whether the rank at `coordinate` sends its shard to the holder.
bool agrees(const HolderStep& step, const Coordinate& coordinate) {
  for (int64_t axis = 0; axis < step.mesh.num_axes(); ++axis) {
    const bool replicates = step.layout.placements[axis].is_replicate();
    if ((replicates || !contains(step.ranks.axes(), axis)) && coordinate[axis] != step.holder[axis]) {
      return false;
    }
  }
  return true;
}

class Signatures {
 public:
  SharedSignature find_or_add(const std::string& signature) {
    const std::scoped_lock lock(mutex_);
    auto& known = living_[signature];
    auto found = known.lock();
    if (!found) {
      found = SharedSignature(new std::string(signature), [this](const auto* gone) { remove(gone); });
      known = found;
    }
    return found;
  }

  size_t size() {
    const std::scoped_lock lock(mutex_);
    return living_.size();
  }

 private:
  void remove(const std::string* gone) {
    const std::unique_ptr<const std::string> owned(gone);
    const std::scoped_lock lock(mutex_);
    const auto found = living_.find(*gone);
    if (found != living_.end() && found->second.expired()) {  // an equal one may have come meanwhile
      living_.erase(found);
    }
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<const std::string>> living_;
};

Signatures& signatures() {
  static auto* const signatures = new Signatures;  // NOLINT: never destroyed
  return *signatures;
}

}  // namespace

std::string FlatStep::signature() const {
  return c10::str(to_string(kind), " ", reduce_op, " ", group, " ", c10::ArrayRef<int64_t>(peers));
}

SharedSignature shared_signature(const std::string& signature) { return signatures().find_or_add(signature); }

size_t num_shared_signatures() { return signatures().size(); }

int64_t FlatStep::num_received() const {
  int64_t total = 0;
  int64_t longest = 0;
  for (const auto& block : received) {
    total += block.numel();
    longest = std::max(longest, block.numel());
  }
  return kind == StepKind::kAllGather ? longest * static_cast<int64_t>(received.size()) : total;
}

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

FlatStep flat_to_holder(const HolderStep& step) {
  const auto& ranks = step.ranks;
  FlatStep flat{StepKind::kAllToAll, step.group, "", {}, {}, {0}, step.peers};
  const auto whole = with_dims(step.shape);
  const bool holds = ranks.own() == step.holder;
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& coordinate = ranks.coordinate(rank);
    const bool receives = coordinate == step.holder && agrees(step, ranks.own());
    flat.sent.push_back(receives ? whole_copy(ShardRuns(step, ranks.own()).shape) : nothing());
    if (holds && agrees(step, coordinate)) {
      ShardRuns runs(step, coordinate);
      flat.received.emplace_back(std::move(runs.to_whole), runs.shape, whole);
    } else {
      flat.received.push_back(nothing());
    }
  }
  if (holds) {
    flat.shape_after = step.shape;
  }
  return flat;
}

FlatStep flat_from_holder(const HolderStep& step) {
  const auto& ranks = step.ranks;
  const ShardRuns own(step, ranks.own());
  const auto whole = with_dims(step.shape);
  FlatStep flat{StepKind::kAllToAll, step.group, "", {}, {}, own.shape, step.peers};
  if (step.shape.empty()) {
    flat.shape_after.clear();
  }
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& coordinate = ranks.coordinate(rank);
    if (ranks.own() == step.holder) {
      ShardRuns runs(step, coordinate);
      flat.sent.emplace_back(std::move(runs.from_whole), whole, runs.shape);
    } else {
      flat.sent.push_back(nothing());
    }
    flat.received.push_back(coordinate == step.holder ? whole_copy(own.shape) : nothing());
  }
  return flat;
}

FlatResults::FlatResults(Steps steps, const std::vector<at::Tensor>& tensors) : steps_(std::move(steps)) {
  const BelowAutograd below_autograd;
  const auto& first = *steps_[0];
  const auto group = group_from_ivalue(first.group, kOp);
  if (first.kind == StepKind::kAllReduce) {
    const auto reduce_op = reduce_op_from_name(first.reduce_op, kOp);
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
  unpack(step, flat, begins_, result);
  if (num_made_ == steps_.size()) {
    flat.reset();
  }
  return result;
}

Start start_together(Steps steps, const std::vector<at::Tensor>& tensors) {
  const BelowAutograd below_autograd;
  const auto& first = *steps[0];
  const auto group = group_from_ivalue(first.group, kOp);
  if (first.kind == StepKind::kAllReduce) {
    return start_all_reduce_coalesced(tensors, reduce_op_from_name(first.reduce_op, kOp), group);
  }
  std::vector<at::Tensor> outputs;
  bool has_results = false;
  for (const auto& step : steps) {
    outputs.push_back(fresh_tensor(step->shape_after, tensors[0]));
    has_results = has_results || outputs.back().numel() > 0;
  }
  auto [start, begins] = start_flat(steps, tensors, group);
  start.buffers.push_back(std::move(start.outputs[0]));
  start.outputs = std::move(outputs);
  start.is_counted = has_results;
  start.epilogue = [steps = std::move(steps), begins = std::move(begins)](const Start& done) {
    auto places = begins;
    for (size_t i = 0; i < steps.size(); ++i) {
      unpack(*steps[i], done.buffers.back(), places, done.outputs[i]);
    }
  };
  return std::move(start);
}

}  // namespace funcol
