#include "transfer/run_mesh_changes.h"

#include <map>
#include <optional>
#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "async/pending_collective.h"
#include "comm/orphaned_works.h"
#include "transfer/op_names.h"
#include "transfer/run_batch.h"
#include "transfer/run_packed.h"

namespace funcol {
namespace {

using Items = std::vector<TransferItem>;

// Returns the numbers of the items that travel together: of one dtype, within a bound. Equal on all ranks.
std::vector<std::vector<size_t>> batches_of(const Items& items, int64_t together_bytes) {
  struct Open {
    size_t batch = 0;
    int64_t bytes = 0;
  };
  std::vector<std::vector<size_t>> batches;
  std::map<at::ScalarType, Open> open;
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t bytes = items[i].program->bytes;
    const auto [found, is_new] = open.try_emplace(items[i].local.scalar_type());
    auto& last = found->second;
    if (is_new || last.bytes + bytes > together_bytes) {
      last = {batches.size(), 0};
      batches.emplace_back();
    }
    batches[last.batch].push_back(i);
    last.bytes += bytes;
  }
  return batches;
}

// The items of a batch, whose tensors it replaces step by step.
class Batch {
 public:
  // Runs the parts before the transfers, and starts the transfers, from `scratch` if it is large enough.
  Batch(Items& items, std::vector<size_t> indices, bool async_op, int64_t together_bytes, at::Tensor scratch)
      : items_(&items),
        indices_(std::move(indices)),
        async_op_(async_op),
        together_bytes_(together_bytes),
        scratch_(std::move(scratch)) {
    run_part(&TransferProgram::before);
    PackedExchanges transfers;
    std::vector<at::Tensor> locals;
    for (const size_t i : indices_) {
      if (items[i].program->exchange) {
        transfers.push_back(items[i].program->exchange);
        locals.push_back(std::move(items[i].local));
        moved_.push_back(i);
      }
    }
    if (!moved_.empty()) {
      auto start = start_together(std::move(transfers), std::move(locals), &scratch_, kRedistribute);
      replace_tensors(moved_, start.outputs);
      pending_ = start.work ? make_pending_collective(std::move(start)) : nullptr;
    }
  }

  // Returns the buffer that was sent, once the new tensors have arrived, or an undefined tensor. The batch
  // after the next uses it again: an allocator that does not fit an aligned block into the hole of an equal
  // one, such as glibc's before 2.38, would take new memory for each.
  at::Tensor wait() {
    if (pending_ && !async_op_) {
      pending_->settle();
      pending_.reset();
    }
    for (const size_t i : moved_) {
      auto& local = (*items_)[i].local;
      local = pending_ ? AsyncTensorImpl::wrap(local, pending_) : local;
    }
    auto scratch = pending_ ? at::Tensor() : std::move(scratch_);
    run_part(&TransferProgram::after);
    return scratch;
  }

 private:
  // Runs this part of the programs that have it.
  void run_part(ExecutionPtr TransferProgram::*part) {
    Items running;
    std::vector<size_t> places;
    for (const size_t i : indices_) {
      if (const auto& execution = (*(*items_)[i].program).*part) {
        running.push_back(
            {std::make_shared<const TransferProgram>(execution), std::move((*items_)[i].local)});
        places.push_back(i);
      }
    }
    replace_tensors(places, run_batch(running, async_op_, together_bytes_));
  }

  void replace_tensors(const std::vector<size_t>& places, std::vector<at::Tensor> tensors) {
    for (size_t i = 0; i < places.size(); ++i) {
      (*items_)[places[i]].local = std::move(tensors[i]);
    }
  }

  Items* items_;
  std::vector<size_t> indices_;
  bool async_op_;
  int64_t together_bytes_;
  at::Tensor scratch_;
  std::vector<size_t> moved_;                      // items with a transfer
  c10::intrusive_ptr<PendingCollective> pending_;  // null if nothing is sent, or all has arrived
};

}  // namespace

std::vector<at::Tensor> run_mesh_changes(Items items, bool async_op, int64_t together_bytes) {
  sweep_some_orphans();
  for (const auto& item : items) {
    if (item.program->before) {
      item.program->before->check(item.local);
    }
  }
  std::optional<Batch> running;
  at::Tensor scratch;
  for (auto& indices : batches_of(items, together_bytes)) {
    Batch next(items, std::move(indices), async_op, together_bytes, std::exchange(scratch, {}));
    if (running.has_value()) {
      scratch = running->wait();
    }
    running = std::move(next);
  }
  if (running.has_value()) {
    running->wait();
  }
  std::vector<at::Tensor> results;
  for (auto& item : items) {
    const auto& program = *item.program;
    const bool is_outside = !program.before && !program.exchange && !program.after;
    results.push_back(is_outside ? item.local.new_empty({0}) : std::move(item.local));
  }
  return results;
}

}  // namespace funcol
