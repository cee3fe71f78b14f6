// Tensors that take the same steps together: at each step they are packed into one buffer for one collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "async/pending_collective.h"
#include "transfer/local_steps.h"
#include "transfer/run_packed.h"
#include "transfer/transfer_program.h"

namespace funcol {

// The default bound on the bytes of tensors that share a collective: packing into one buffer pays only for
// small tensors.
constexpr int64_t kTogetherBytes = int64_t{256} << 20;

// Items that go together, and their tensors after the steps so far. Their programs have no part after the
// exchange, which is the last step.
class Bundle {
 public:
  // Makes a bundle for items like `item`. `is_observed` means that a layer of PyTorch observes operations, or
  // that a tensor needs a gradient. No item has an exchange then.
  Bundle(const TransferItem& item, bool async_op, bool is_observed)
      : first_(&item), async_op_(async_op), is_observed_(is_observed) {}

  // Adds `item`, or returns false if is_compatible() is false or the sum would exceed `together_bytes`.
  bool add(const TransferItem& item, size_t index, int64_t together_bytes);
  // Returns true if one collective can move both `item` and the bundle's items at each step.
  bool is_compatible(const TransferItem& item) const;

  size_t num_steps() const { return num_executed() + (program().exchange ? 1 : 0); }
  void run_step(size_t index);
  // Puts each item's tensor at its index, after all steps.
  void collect_results(std::vector<at::Tensor>& results);

  // Starts the last step, whose results are made one by one, and which replaces run_step() and
  // collect_results(). Not for bundles without steps.
  FlatResults start_last_step();
  // Completes a result of the last step.
  at::Tensor complete_last(size_t item, at::Tensor moved) const;

  const std::vector<size_t>& indices() const { return indices_; }

 private:
  const TransferProgram& program() const { return *first_->program; }
  const Execution& execution(size_t item) const { return *items_[item]->program->before; }
  size_t num_executed() const { return program().before ? program().before->steps().size() : 0; }
  bool is_last(size_t index) const { return index == num_executed(); }
  std::shared_ptr<const PackedExchange> flat(size_t item, size_t index) const;
  void end_step(size_t index);
  // Returns the items' parts of step `index`, and their tensors, which locals_ then lacks.
  std::pair<PackedExchanges, std::vector<at::Tensor>> packed_step(size_t index);
  void run_step_together(size_t index);

  const TransferItem* first_;
  bool async_op_;
  bool is_observed_;
  int64_t bytes_ = 0;
  std::vector<size_t> indices_;
  std::vector<const TransferItem*> items_;
  std::vector<LocalTensor> locals_;
  c10::intrusive_ptr<PendingCollective> pending_;
};

// Runs the steps of all bundles, except the last `num_left` of each: each step of all before the next one.
void run_steps(std::vector<Bundle>& bundles, size_t num_left);

// Returns the bundles of `items`, in the order in which they begin. `items` must outlive them.
std::vector<Bundle> bundles_of(const std::vector<TransferItem>& items, bool async_op, int64_t together_bytes,
                               bool is_observed = false);

}  // namespace funcol
