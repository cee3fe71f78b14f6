#include "redistribute/run_many.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "async/async_tensor.h"
#include "async/held_memory.h"
#include "async/layers.h"
#include "async/pending_collective.h"
#include "comm/orphaned_works.h"
#include "comm/started.h"
#include "redistribute/flat_step.h"
#include "redistribute/local_steps.h"

namespace funcol {
namespace {

bool is_watched(const at::Tensor& tensor) {
  return tensor.is_meta() || belongs_to_layer(tensor) ||
         (at::GradMode::is_enabled() && tensor.requires_grad());
}

// Items that go together, and their tensors after the steps so far.
class Bundle {
 public:
  Bundle(const ManyItem& item, bool async_op) : first_(&item), async_op_(async_op) {}

  // False if `item` is not added, as it is not alike or would exceed `together_bytes`.
  bool add(const ManyItem& item, size_t index, int64_t together_bytes) {
    const int64_t bytes = item.execution->peak_bytes();
    if (!indices_.empty() && (bytes_ + bytes > together_bytes || !is_alike(item))) {
      return false;
    }
    bytes_ += bytes;
    indices_.push_back(index);
    executions_.push_back(item.execution.get());
    locals_.push_back({item.local, /*is_callers=*/true, /*may_change=*/async_op_});
    return true;
  }

  bool is_alike(const ManyItem& item) const {
    return item.execution->steps_id() == first_->execution->steps_id() &&
           item.local.scalar_type() == first_->local.scalar_type() &&
           item.local.device() == first_->local.device() && !first_->masks.apply && !item.masks.apply;
  }

  size_t num_steps() const { return executions_[0]->steps().size(); }

  void take_step(size_t index) {
    const Label label(executions_[0]->step_name(index));
    if (pending_) {
      pending_->settle();
      pending_.reset();
      for (size_t i = 0; i < locals_.size(); ++i) {
        locals_[i].tensor = executions_[i]->steps()[index - 1]->finish(locals_[i].tensor);
      }
    }
    if (locals_.size() > 1 && executions_[0]->steps()[index]->flat()) {
      start_together(index);
      return;
    }
    for (size_t i = 0; i < locals_.size(); ++i) {
      locals_[i] = executions_[i]->steps()[index]->run_plain(locals_[i], first_->masks);
    }
  }

  void finish(std::vector<at::Tensor>& results) {
    const bool has_steps = num_steps() > 0;
    if (pending_ && !async_op_) {
      pending_->settle();
    }
    for (size_t i = 0; i < locals_.size(); ++i) {
      auto& result = results[indices_[i]];
      if (pending_) {
        result = async_op_ ? AsyncTensorImpl::wrap(locals_[i].tensor, pending_) : locals_[i].tensor;
        result = executions_[i]->steps().back()->finish(std::move(result));
      } else {
        result = has_steps ? own_result(locals_[i]) : locals_[i].tensor;
      }
      if (!async_op_ && has_steps) {
        settle(result);
      }
    }
  }

 private:
  void start_together(size_t index) {
    std::vector<std::shared_ptr<const FlatStep>> steps;
    std::vector<at::Tensor> tensors;
    steps.reserve(locals_.size());
    tensors.reserve(locals_.size());
    for (size_t i = 0; i < locals_.size(); ++i) {
      steps.push_back(executions_[i]->steps()[index]->flat());
      tensors.push_back(std::move(locals_[i].tensor));
    }
    auto start = funcol::start_together(std::move(steps), tensors);
    for (size_t i = 0; i < locals_.size(); ++i) {
      locals_[i] = {start.outputs[i], /*is_callers=*/false};
    }
    pending_ = hold(std::move(start));
  }

  const ManyItem* first_;
  bool async_op_;
  int64_t bytes_ = 0;
  std::vector<size_t> indices_;
  std::vector<const Execution*> executions_;
  std::vector<LocalTensor> locals_;
  c10::intrusive_ptr<PendingCollective> pending_;
};

std::vector<Bundle> bundles_of(const std::vector<ManyItem>& items, bool async_op, int64_t together_bytes) {
  std::vector<Bundle> bundles;
  std::vector<size_t> open;  // the last bundle of each kind
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& item = items[i];
    const auto alike =
        std::ranges::find_if(open, [&](size_t index) { return bundles[index].is_alike(item); });
    if (alike != open.end() && bundles[*alike].add(item, i, together_bytes)) {
      continue;
    }
    if (alike == open.end()) {
      open.push_back(bundles.size());
    } else {
      *alike = bundles.size();
    }
    bundles.emplace_back(item, async_op).add(item, i, together_bytes);
  }
  return bundles;
}

}  // namespace

std::vector<at::Tensor> run_many(const std::vector<ManyItem>& items, bool async_op, int64_t together_bytes) {
  for (const auto& item : items) {
    item.execution->check(item.local);
  }
  std::vector<at::Tensor> results(items.size());
  if (has_active_layers() ||
      std::ranges::any_of(items, [](const auto& item) { return is_watched(item.local); })) {
    for (size_t i = 0; i < items.size(); ++i) {
      results[i] = items[i].execution->run(items[i].local, async_op, items[i].masks);
    }
    return results;
  }
  sweep_some_orphans();
  auto bundles = bundles_of(items, async_op, together_bytes);
  bool goes_on = true;
  for (size_t step = 0; goes_on; ++step) {
    goes_on = false;
    for (auto& bundle : bundles) {
      if (step < bundle.num_steps()) {
        bundle.take_step(step);
        goes_on = true;
      }
    }
  }
  for (auto& bundle : bundles) {
    bundle.finish(results);
  }
  return results;
}

}  // namespace funcol
