#include "transfer/local_steps.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/cat.h>

#include <utility>

#include "async/async_tensor.h"
#include "ops/backend_tensor.h"
#include "transfer/box_copy.h"
#include "transfer/communicating_steps.h"
#include "transfer/op_names.h"
#include "transfer/reduction_identity.h"
#include "transfer/selection.h"

namespace funcol {
namespace {

class Split final : public LocalStep {
 public:
  explicit Split(const StepGeometry& geometry)
      : selection_(selection_of(geometry)),
        copy_(selection_copy(selection_, geometry.shape_before())),
        shape_after_(geometry.shape_after()) {}

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    const bool is_callers = local.is_callers && !select_copies(selection_);
    return {select(local.tensor, selection_), is_callers, is_callers && local.may_change};
  }

  // Copies at once, because own_result() would copy a view.
  LocalTensor run_plain(const LocalTensor& local, const MaskHooks& masks) const override {
    settle(local.tensor);
    if (!local.tensor.is_contiguous() || local.tensor.is_conj() || local.tensor.is_neg()) {
      return run(local, masks);
    }
    const auto shard = fresh_tensor(shape_after_, local.tensor);
    copy_.run(local.tensor, 0, shard, 0);
    return {shard, false};
  }

  // Leaves large copies to ATen, which uses several threads.
  LocalTensor run_now(const LocalTensor& local, const MaskHooks& masks) const override {
    return copy_.numel() <= at::internal::GRAIN_SIZE ? run_plain(local, masks) : run(local, masks);
  }

 private:
  static Selection selection_of(const StepGeometry& geometry) {
    Selection selection;
    const auto rank = geometry.ranks.own_rank();
    for (int64_t dim = 0; dim < geometry.num_dims(); ++dim) {
      const auto held = geometry.before(dim, rank);
      const auto wanted = geometry.after(dim, rank);
      if (common_indices(wanted, held) != wanted) {
        geometry.contradict("it wants what the rank does not hold");
      }
      select_dim(dim, wanted, held, selection);
    }
    return selection;
  }

  Selection selection_;
  BoxCopy copy_;
  std::vector<int64_t> shape_after_;
};

// The step to a partial value: the rank's tensor among neutral elements.
class Embed final : public LocalStep {
 public:
  explicit Embed(const StepGeometry& geometry) : shape_(geometry.shape.size()) {
    const auto rank = geometry.ranks.own_rank();
    for (const int64_t axis : geometry.axes()) {
      const auto& before = geometry.step.before.placements[axis];
      const auto& after = geometry.step.after.placements[axis];
      if (!after.is_partial() || before.is_partial()) {
        geometry.contradict("it makes no partial value");
      }
      op_ = after.op;
      // Of replicas that would add up, one holds the value and the others neutral elements.
      const bool adds_up = after.op == PartialOp::kSum || after.op == PartialOp::kProduct ||
                           after.op == PartialOp::kBor || after.op == PartialOp::kBxor;
      is_neutral_ = is_neutral_ || (before.is_replicate() && adds_up && geometry.ranks.own()[axis] != 0);
      if (before.is_shard() && after.op == PartialOp::kAvg) {
        geometry.contradict("an average has no neutral element to put around a shard");
      }
    }
    for (int64_t dim = 0; dim < geometry.num_dims(); ++dim) {
      const auto held = geometry.before(dim, rank);
      const auto wanted = geometry.after(dim, rank);
      shape_[dim] = num_indices(wanted);
      if (held != wanted) {
        placed_.push_back({dim, positions(held, wanted)});
      }
    }
  }

  void check(const at::Tensor& tensor) const override {
    if (is_neutral_ || !placed_.empty()) {
      neutral_element(op_, tensor.scalar_type());
    }
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    if (is_neutral_) {
      return {neutral(local.tensor, shape_), false};
    }
    auto tensor = local.tensor;
    for (const auto& [dim, runs] : placed_) {
      tensor = embed(tensor, dim, runs);
    }
    const bool is_callers = local.is_callers && placed_.empty();
    return {tensor, is_callers, is_callers && local.may_change};
  }

 private:
  at::Tensor neutral(const at::Tensor& like, at::IntArrayRef shape) const {
    return like.new_full(shape, neutral_element(op_, like.scalar_type()));
  }

  // Returns `tensor` with its indices of `dim` at the positions `runs`, among neutral elements.
  at::Tensor embed(const at::Tensor& tensor, int64_t dim, const Intervals& runs) const {
    auto shape = tensor.sizes().vec();
    std::vector<at::Tensor> parts;
    int64_t filled = 0;
    int64_t taken = 0;
    const auto fill_to = [&](int64_t end) {
      shape[dim] = end - filled;
      if (shape[dim] > 0) {
        parts.push_back(neutral(tensor, shape));
      }
      filled = end;
    };
    for (const auto& run : runs) {
      fill_to(run.begin);
      parts.push_back(tensor.narrow(dim, taken, run.size));
      taken += run.size;
      filled = run.end();
    }
    fill_to(shape_[dim]);
    return at::cat(parts, dim);
  }

  bool is_neutral_ = false;
  PartialOp op_ = PartialOp::kSum;
  std::vector<int64_t> shape_;
  Selection placed_;  // the positions of the rank's indices in its new tensor
};

class Mask final : public LocalStep {
 public:
  Mask(const StepGeometry& geometry, bool applies) : applies_(applies) {
    for (int64_t axis = 0; axis < geometry.mesh.num_axes(); ++axis) {
      if (contains(geometry.step.axes, axis)) {
        axes_.push_back(axis);
      }
    }
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& masks) const override {
    auto tensor = local.tensor;
    const auto& hook = applies_ ? masks.apply : masks.mask;
    TORCH_CHECK_NOT_IMPLEMENTED(hook, "funcol::", kRedistribute,
                                ": the plan has a masked partial, but nothing says what "
                                "its mask is. Redistribute specs that hold PyTorch's _MaskPartial.");
    for (const int64_t axis : axes_) {
      tensor = hook(tensor, axis);
    }
    return {tensor, false};
  }

 private:
  std::vector<int64_t> axes_;
  bool applies_;
};

}  // namespace

std::unique_ptr<LocalStep> make_local_step(const Plan& plan, const Step& step, const AxisGroups& groups,
                                           const Coordinate& coordinate) {
  const StepGeometry geometry(plan, step, groups, coordinate);
  if (communicates(step.kind)) {
    return make_communicating_step(geometry);
  }
  switch (step.kind) {
    case StepKind::kSplit:
      return std::make_unique<Split>(geometry);
    case StepKind::kToPartial:
    case StepKind::kEmbed:
      return std::make_unique<Embed>(geometry);
    case StepKind::kApplyMask:
    case StepKind::kMask:
      return std::make_unique<Mask>(geometry, step.kind == StepKind::kApplyMask);
    default:
      geometry.contradict("unknown kind");
  }
}

}  // namespace funcol
