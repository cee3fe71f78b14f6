#include "transfer/executor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "async/async_tensor.h"
#include "async/dispatch_modes.h"
#include "comm/call_site.h"
#include "layout/heap_bytes.h"
#include "layout/shards.h"
#include "transfer/local_steps.h"
#include "transfer/op_names.h"

namespace funcol {

namespace {

std::atomic<int64_t> num_runs{0};
std::atomic<int64_t> num_bytes_sent{0};

// Returns true if `tensor` is on the CPU, and no mode, profiler or autograd observes operations on it.
bool is_unobserved_on_cpu(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kLazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !has_active_layers() && !at::hasCallbacks() &&
         !belongs_to_layer(tensor) && !tensor.key_set().has_any(kLazy) &&
         !(at::GradMode::is_enabled() && tensor.requires_grad()) && !tensor._fw_grad(/*level=*/0).defined();
}

// Returns the axes that cut `dim` in front of `axis`, first cut first, or nullopt if `axis` does not cut it.
std::optional<std::vector<int64_t>> axes_in_front(const Layout& layout, size_t dim, int64_t axis) {
  if (dim >= layout.order.size()) {
    return std::nullopt;
  }
  const auto& axes = layout.order[dim];
  const auto found = std::ranges::find(axes, axis);
  return found == axes.end() ? std::nullopt : std::optional(std::vector(axes.begin(), found));
}

// Returns true if the axes that cut a dim in front of an axis of several ranks change from src to dst.
bool changes_cut_order(const Plan& plan) {
  for (size_t dim = 0; dim < plan.shape.size(); ++dim) {
    for (int64_t axis = 0; axis < plan.mesh.num_axes(); ++axis) {
      const auto before = axes_in_front(plan.src, dim, axis);
      const auto after = axes_in_front(plan.dst, dim, axis);
      if (plan.mesh.sizes[axis] > 1 && before && after && *before != *after) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

RedistributionCounts redistribution_counts() noexcept {
  return {num_runs.load(std::memory_order_relaxed), num_bytes_sent.load(std::memory_order_relaxed)};
}

Execution::Execution(const Plan& plan, const AxisGroups& groups, const Coordinate& coordinate)
    : peak_bytes_(plan.peak_bytes),
      shape_before_(local_shape(plan.src, plan.mesh, plan.shape, coordinate)),
      full_shape_(plan.shape),
      src_(to_string(plan.src)),
      trace_(to_string(plan)),
      copies_(changes_cut_order(plan)) {
  std::string signature;
  for (const auto& step : plan.steps) {
    steps_.push_back(make_local_step(plan, step, groups, coordinate));
    bytes_sent_ += step.bytes_sent;
    step_names_.push_back(std::string(kRedistribute) + " " + trace_ + ": " + to_string(step, plan.mesh));
    if (communicates(step.kind)) {
      groups_.push_back(groups.at(step.axes).ref);
    }
    const auto of_step = steps_.back()->signature();
    signature.append(of_step.empty() ? to_string(step.kind) : of_step).append(";");
  }
  steps_id_ = shared_signature(signature);
}

Execution::~Execution() = default;

bool Execution::fits(const at::Tensor& local) const {
  return std::ranges::equal(local.sym_sizes(), shape_before_) ||
         (std::ranges::find(shape_before_, 0) != shape_before_.end() && local.sym_numel() == 0);
}

at::Tensor Execution::shaped(const at::Tensor& local) const {
  return std::ranges::equal(local.sym_sizes(), shape_before_) ? local : local.view(shape_before_);
}

at::Tensor Execution::unmoved(const at::Tensor& local) const {
  return copies_ ? at::clone(local, at::MemoryFormat::Contiguous) : local;
}

void Execution::count_run() const noexcept {
  num_runs.fetch_add(1, std::memory_order_relaxed);
  num_bytes_sent.fetch_add(bytes_sent_, std::memory_order_relaxed);
}

size_t Execution::heap_bytes() const {
  constexpr size_t kStepBytes = 1024;  // of its boxes: a block a rank
  return steps_.size() * kStepBytes + funcol::heap_bytes(step_names_) + funcol::heap_bytes(shape_before_) +
         funcol::heap_bytes(full_shape_) + funcol::heap_bytes(src_) + funcol::heap_bytes(trace_) +
         groups_.capacity() * sizeof(GroupRef);
}

bool Execution::is_current() const { return std::ranges::all_of(groups_, funcol::is_current); }

void Execution::check(const at::Tensor& local) const {
  TORCH_CHECK_VALUE(fits(local), "funcol::", kRedistribute, ": the local tensor has shape ",
                    local.sym_sizes(), ", but this rank holds ", at::IntArrayRef(shape_before_),
                    " of a tensor of shape ", at::IntArrayRef(full_shape_), " under ", src_,
                    ". Pass the shard that belongs to the source spec.");
  for (const auto& group : groups_) {
    check_is_current(group, kRedistribute);
  }
  for (const auto& step : steps_) {
    step->check(local);
  }
}

at::Tensor Execution::run(const at::Tensor& local, bool async_op, const MaskHooks& masks) const {
  check(local);
  if (steps_.empty()) {
    return unmoved(shaped(local));
  }
  count_run();
  const bool runs_now = !async_op && is_unobserved_on_cpu(local);
  LocalTensor current{shaped(local), /*is_callers=*/true, /*may_change=*/async_op};
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Label label(step_names_[i]);
    current = runs_now ? steps_[i]->run_now(current, masks) : steps_[i]->run(current, masks);
  }
  auto result = own_result(current);
  if (!async_op) {
    settle(result);
  }
  return result;
}

at::Tensor own_result(const LocalTensor& local) {
  return local.is_callers ? at::clone(local.tensor, at::MemoryFormat::Contiguous) : local.tensor.contiguous();
}

}  // namespace funcol
