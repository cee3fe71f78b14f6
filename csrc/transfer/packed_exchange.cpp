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

BoxCopy full_copy(const std::vector<int64_t>& shape) { return {full_runs(shape), shape, shape}; }

std::vector<CopyRun> reversed(std::vector<CopyRun> runs) {
  for (auto& run : runs) {
    std::swap(run.from, run.to);
  }
  return runs;
}

// Calls visit(shape, runs from the full tensor) for the shard of each rank.
template <typename Visit>
void for_each_shard(int64_t dim, const std::vector<Intervals>& shards, const std::vector<int64_t>& full_shape,
                    const Visit& visit) {
  for (const auto& positions : shards) {
    auto shape = full_shape;
    shape[dim] = num_indices(positions);
    visit(shape, runs_to_shard(positions));
  }
}

// Returns the copy from the block of `rank`, which has these cuts, to the new tensor.
BoxCopy received_block(const Exchange& exchange, const std::vector<int64_t>& cuts, int64_t rank) {
  std::vector<std::vector<CopyRun>> runs;
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
    if (found != living_.end() && found->second.expired()) {  // an equal one may have been added since
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

std::string PackedExchange::signature() const { return signature_of(kind, group, reduce_op, participants); }

std::string signature_of(StepKind kind, const c10::IValue& group, const std::string& reduce_op,
                         const std::string& participants) {
  return c10::str(to_string(kind), " ", reduce_op, " ", group, " ", participants);
}

SharedSignature shared_signature(const std::string& signature) { return signatures().find_or_add(signature); }

size_t num_shared_signatures() { return signatures().size(); }

int64_t PackedExchange::num_received() const {
  int64_t total = 0;
  int64_t longest = 0;
  for (const auto& block : received) {
    total += block.copy.numel();
    longest = std::max(longest, block.copy.numel());
  }
  return kind == StepKind::kAllGather ? longest * num_ranks : total;
}

PackedExchange packed_all_gather(c10::IValue group, int64_t dim, const std::vector<Intervals>& shards,
                                 std::vector<int64_t> full_shape, int64_t own_rank) {
  PackedExchange step{StepKind::kAllGather, std::move(group), std::ssize(shards)};
  step.shape_after = std::move(full_shape);
  for_each_shard(dim, shards, step.shape_after, [&](const auto& shape, auto to_shard) {
    const auto rank = std::ssize(step.received);
    if (rank == own_rank) {
      step.sent.push_back({rank, full_copy(shape)});
    }
    auto runs = full_runs(shape);
    runs[dim] = reversed(std::move(to_shard));
    step.received.push_back({rank, BoxCopy(std::move(runs), shape, step.shape_after)});
  });
  return step;
}

PackedExchange packed_reduce_scatter(c10::IValue group, std::string reduce_op, int64_t dim,
                                     const std::vector<Intervals>& shards, std::vector<int64_t> full_shape,
                                     int64_t own_rank) {
  PackedExchange step{StepKind::kReduceScatter, std::move(group), std::ssize(shards), std::move(reduce_op)};
  for_each_shard(dim, shards, full_shape, [&](const auto& shape, auto to_shard) {
    const auto rank = std::ssize(step.sent);
    if (rank == own_rank) {
      step.received.push_back({rank, full_copy(shape)});
      step.shape_after = shape;
    }
    auto runs = full_runs(shape);
    runs[dim] = std::move(to_shard);
    step.sent.push_back({rank, BoxCopy(std::move(runs), full_shape, shape)});
  });
  return step;
}

PackedExchange packed_all_reduce(c10::IValue group, int64_t num_ranks, std::string reduce_op) {
  return {StepKind::kAllReduce, std::move(group), num_ranks, std::move(reduce_op)};
}

PackedExchange packed_all_to_all(c10::IValue group, const Exchange& exchange) {
  PackedExchange step{StepKind::kAllToAll, std::move(group), std::ssize(exchange.sent)};
  step.shape_after = exchange.shape_after;
  for (int64_t rank = 0; rank < step.num_ranks; ++rank) {
    const auto& sent = exchange.sent[rank];
    if (sent.numel > 0) {
      step.sent.push_back({rank, selection_copy(sent.selection, exchange.shape_before)});
    }
  }
  for (size_t block = 0; block < exchange.sources.size(); ++block) {
    const int64_t rank = exchange.sources[block];
    if (exchange.received[rank].numel > 0) {
      step.received.push_back({rank, received_block(exchange, exchange.cuts_of(block), rank)});
    }
  }
  std::ranges::stable_sort(step.received, {}, &PeerBlock::rank);
  return step;
}

}  // namespace funcol
