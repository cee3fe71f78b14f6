#include "transfer/packed_exchange.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "layout/tensor_meta.h"

namespace funcol {
namespace {

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

// Returns true if the rank at `coordinate` sends its shard to the holder.
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

std::string PackedExchange::signature() const {
  return c10::str(to_string(kind), " ", reduce_op, " ", group, " ", c10::ArrayRef<int64_t>(peers));
}

SharedSignature shared_signature(const std::string& signature) { return signatures().find_or_add(signature); }

size_t num_shared_signatures() { return signatures().size(); }

int64_t PackedExchange::num_received() const {
  int64_t total = 0;
  int64_t longest = 0;
  for (const auto& block : received) {
    total += block.numel();
    longest = std::max(longest, block.numel());
  }
  return kind == StepKind::kAllGather ? longest * static_cast<int64_t>(received.size()) : total;
}

PackedExchange flat_all_gather(c10::IValue group, int64_t dim, const std::vector<Intervals>& shards,
                               std::vector<int64_t> whole_shape, int64_t own_rank) {
  PackedExchange step{StepKind::kAllGather, std::move(group), "", {}, {}, std::move(whole_shape)};
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

PackedExchange flat_reduce_scatter(c10::IValue group, std::string reduce_op, int64_t dim,
                                   const std::vector<Intervals>& shards, std::vector<int64_t> whole_shape,
                                   int64_t own_rank) {
  PackedExchange step{StepKind::kReduceScatter, std::move(group), std::move(reduce_op), {}, {}, {}};
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

PackedExchange flat_all_reduce(c10::IValue group, std::string reduce_op) {
  return {StepKind::kAllReduce, std::move(group), std::move(reduce_op), {}, {}, {}};
}

PackedExchange flat_all_to_all(c10::IValue group, const Exchange& exchange) {
  PackedExchange step{StepKind::kAllToAll, std::move(group), "", {}, {}, exchange.shape_after};
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

PackedExchange flat_to_holder(const HolderStep& step) {
  const auto& ranks = step.ranks;
  PackedExchange flat{StepKind::kAllToAll, step.group, "", {}, {}, {0}, step.peers};
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

PackedExchange flat_from_holder(const HolderStep& step) {
  const auto& ranks = step.ranks;
  const ShardRuns own(step, ranks.own());
  const auto whole = with_dims(step.shape);
  PackedExchange flat{StepKind::kAllToAll, step.group, "", {}, {}, own.shape, step.peers};
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

}  // namespace funcol
