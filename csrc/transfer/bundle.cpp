#include "transfer/bundle.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "comm/call_site.h"

namespace funcol {

bool Bundle::add(const TransferItem& item, size_t index, int64_t together_bytes) {
  const auto& steps = item.program->before;
  if (!indices_.empty() && (bytes_ + item.program->bytes > together_bytes || !is_compatible(item))) {
    return false;
  }
  if (steps && !steps->steps().empty()) {
    steps->count_run();
  }
  bytes_ += item.program->bytes;
  indices_.push_back(index);
  items_.push_back(&item);
  locals_.push_back({steps ? steps->shaped(item.local) : item.local, /*is_callers=*/true,
                     /*may_change=*/async_op_});
  return true;
}

bool Bundle::is_compatible(const TransferItem& item) const {
  const auto& steps = item.program->before;
  const auto& first_steps = program().before;
  return (steps && first_steps ? steps->steps_id() == first_steps->steps_id() : steps == first_steps) &&
         item.program->exchange_id == program().exchange_id &&
         item.local.scalar_type() == first_->local.scalar_type() &&
         item.local.device() == first_->local.device() && !first_->masks.apply && !item.masks.apply;
}

std::shared_ptr<const PackedExchange> Bundle::flat(size_t item, size_t index) const {
  return is_last(index) ? items_[item]->program->exchange : execution(item).steps()[index]->flat();
}

void Bundle::end_step(size_t index) {
  if (!pending_) {
    return;
  }
  pending_->settle();
  pending_.reset();
  for (size_t i = 0; i < locals_.size() && !is_last(index); ++i) {
    locals_[i].tensor = execution(i).steps()[index]->complete(locals_[i].tensor);
  }
}

void Bundle::run_step(size_t index) {
  if (index > 0) {
    end_step(index - 1);
  }
  const Label label(is_last(index) ? "redistribute_many: to owners or from them"
                                   : std::string_view(execution(0).step_name(index)));
  if (is_last(index) || (locals_.size() > 1 && flat(0, index))) {
    run_step_together(index);
    return;
  }
  for (size_t i = 0; i < locals_.size(); ++i) {
    const auto& step = *execution(i).steps()[index];
    locals_[i] =
        is_observed_ ? step.run(locals_[i], first_->masks) : step.run_plain(locals_[i], first_->masks);
  }
}

std::pair<PackedExchanges, std::vector<at::Tensor>> Bundle::packed_step(size_t index) {
  PackedExchanges steps;
  std::vector<at::Tensor> tensors;
  steps.reserve(locals_.size());
  tensors.reserve(locals_.size());
  for (size_t i = 0; i < locals_.size(); ++i) {
    steps.push_back(flat(i, index));
    tensors.push_back(std::move(locals_[i].tensor));
  }
  return {std::move(steps), std::move(tensors)};
}

void Bundle::run_step_together(size_t index) {
  auto [steps, tensors] = packed_step(index);
  if (is_observed_) {
    const auto moved = run_together(steps, tensors);
    for (size_t i = 0; i < locals_.size(); ++i) {
      locals_[i] = {execution(i).steps()[index]->complete(moved[i]), /*is_callers=*/false};
    }
    return;
  }
  auto start = start_together(std::move(steps), std::move(tensors));
  for (size_t i = 0; i < locals_.size(); ++i) {
    locals_[i] = {start.outputs[i], /*is_callers=*/false};
  }
  pending_ = make_pending_collective(std::move(start));
}

void Bundle::collect_results(std::vector<at::Tensor>& results) {
  const bool has_steps = num_steps() > 0;
  if (pending_ && !async_op_) {
    pending_->settle();
  }
  for (size_t i = 0; i < locals_.size(); ++i) {
    auto& result = results[indices_[i]];
    if (pending_) {
      result = async_op_ ? AsyncTensorImpl::wrap(locals_[i].tensor, pending_) : locals_[i].tensor;
      result = complete_last(i, std::move(result));
    } else {
      const auto& steps = items_[i]->program->before;
      result = has_steps ? own_result(locals_[i])
               : steps   ? steps->unmoved(locals_[i].tensor)
                         : locals_[i].tensor;
    }
    if (!async_op_ && has_steps) {
      settle(result);
    }
    // Detaches a result that traveled with tensors that need gradients.
    if (is_observed_ && result.requires_grad() && !items_[i]->local.requires_grad()) {
      result = result.detach();
    }
  }
}

FlatResults Bundle::start_last_step() {
  const size_t index = num_steps() - 1;
  if (index > 0) {
    end_step(index - 1);
  }
  auto [steps, tensors] = packed_step(index);
  return {std::move(steps), tensors};
}

at::Tensor Bundle::complete_last(size_t item, at::Tensor moved) const {
  return program().exchange ? moved : execution(item).steps().back()->complete(std::move(moved));
}

void run_steps(std::vector<Bundle>& bundles, size_t num_left) {
  bool goes_on = true;
  for (size_t step = 0; goes_on; ++step) {
    goes_on = false;
    for (auto& bundle : bundles) {
      if (step + num_left < bundle.num_steps()) {
        bundle.run_step(step);
        goes_on = true;
      }
    }
  }
}

std::vector<Bundle> bundles_of(const std::vector<TransferItem>& items, bool async_op, int64_t together_bytes,
                               bool is_observed) {
  std::vector<Bundle> bundles;
  std::vector<size_t> open;  // the last bundle of each kind
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& item = items[i];
    const auto compatible =
        std::ranges::find_if(open, [&](size_t index) { return bundles[index].is_compatible(item); });
    if (compatible != open.end() && bundles[*compatible].add(item, i, together_bytes)) {
      continue;
    }
    if (compatible == open.end()) {
      open.push_back(bundles.size());
    } else {
      *compatible = bundles.size();
    }
    bundles.emplace_back(item, async_op, is_observed).add(item, i, together_bytes);
  }
  return bundles;
}

}  // namespace funcol
