#include "redistribute/local_steps.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "async/async_tensor.h"
#include "async/layers.h"
#include "comm/process_group.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/wire.h"
#include "redistribute/block_transport.h"
#include "redistribute/blocks.h"
#include "redistribute/neutral_elements.h"
#include "redistribute/selection.h"

namespace funcol {
namespace {

using c10::IValue;

constexpr auto kOp = "redistribute";

// Indices and shapes before and after a step, for the ranks of its group.
struct StepGeometry {
  StepGeometry(const Plan& plan, const Step& step, const AxisGroups& groups, const Coordinate& coordinate)
      : mesh(plan.mesh),
        step(step),
        shape(plan.shape),
        group(find(plan, step, groups)),
        ranks(plan.mesh, step.axes, coordinate, group == nullptr ? std::vector<int64_t>() : group->members) {}

  static const AxisGroup* find(const Plan& plan, const Step& step, const AxisGroups& groups) {
    const auto found = groups.find(step.axes);
    TORCH_CHECK_VALUE(found != groups.end() || !communicates(step.kind),
                      "funcol::redistribute: no process group for ", to_string(step, plan.mesh),
                      ". Plan with the merged axes that have one.");
    return found == groups.end() ? nullptr : &found->second;
  }

  Intervals before(int64_t dim, int64_t rank) const {
    return local_indices(step.before, mesh, dim, shape[dim], ranks.coordinate(rank));
  }
  Intervals after(int64_t dim, int64_t rank) const {
    return local_indices(step.after, mesh, dim, shape[dim], ranks.coordinate(rank));
  }
  int64_t num_dims() const { return static_cast<int64_t>(shape.size()); }
  std::vector<int64_t> shape_before() const { return local_shape(step.before, mesh, shape, ranks.own()); }
  std::vector<int64_t> shape_after() const { return local_shape(step.after, mesh, shape, ranks.own()); }

  // The axes of the step that hold several ranks, first to last.
  std::vector<int64_t> axes() const {
    std::vector<int64_t> found;
    for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
      if (contains(step.axes, axis) && mesh.sizes[axis] > 1) {
        found.push_back(axis);
      }
    }
    return found;
  }

  // The dim that `layout` shards on every axis of the step, if there is one.
  std::optional<int64_t> common_dim(const Layout& layout) const {
    std::optional<int64_t> dim;
    for (const int64_t axis : axes()) {
      const auto& placement = layout.placements[axis];
      if (!placement.is_shard() || (dim.has_value() && *dim != placement.dim)) {
        return std::nullopt;
      }
      dim = placement.dim;
    }
    return dim;
  }

  [[noreturn]] void contradict(const char* why) const {
    TORCH_INTERNAL_ASSERT(false, "funcol::redistribute: ", to_string(step, mesh), " from ",
                          to_string(step.before), " to ", to_string(step.after), " of ",
                          at::IntArrayRef(shape), ": ", why);
  }

  const Mesh& mesh;
  const Step& step;
  const std::vector<int64_t>& shape;
  const AxisGroup* group;
  GroupRanks ranks;
};

// The size of each rank's shard, as the argument split_sizes of the ops: none where all are equal.
class ShardSizes {
 public:
  void add(int64_t size) {
    is_equal_ = is_equal_ && (sizes_.empty() || sizes_.front() == size);
    sizes_.emplace_back(size);
  }
  at::OptionalSymIntArrayRef for_op() const {
    return is_equal_ ? at::OptionalSymIntArrayRef() : at::OptionalSymIntArrayRef(sizes_);
  }

 private:
  std::vector<c10::SymInt> sizes_;
  bool is_equal_ = true;
};

class CommunicatingStep : public LocalStep {
 public:
  explicit CommunicatingStep(const StepGeometry& geometry) : group_(geometry.group->group) {}

  std::shared_ptr<const FlatStep> flat() const final { return flat_; }

 protected:
  void set_flat(FlatStep flat) { flat_ = std::make_shared<const FlatStep>(std::move(flat)); }

  IValue group_;

 private:
  std::shared_ptr<const FlatStep> flat_;
};

class AllGather final : public CommunicatingStep {
 public:
  AllGather(const StepGeometry& geometry, int64_t dim) : CommunicatingStep(geometry), dim_(dim) {
    std::map<int64_t, Interval> by_position;
    std::vector<Intervals> shards;
    const auto wanted = geometry.after(dim, geometry.ranks.own_rank());
    int64_t gathered = 0;
    for (int64_t rank = 0; rank < geometry.ranks.size(); ++rank) {
      const auto held = geometry.before(dim, rank);
      int64_t seen = gathered;
      shards.push_back(positions(held, wanted));
      for (const auto& place : shards.back()) {
        by_position[place.begin] = {seen, place.size};
        seen += place.size;
      }
      gathered += num_indices(held);
      if (seen != gathered) {
        geometry.contradict("more is gathered than the layout after it holds");
      }
      sizes_.add(num_indices(held));
    }
    if (gathered != num_indices(wanted)) {
      geometry.contradict("less is gathered than the layout after it holds");
    }
    Intervals order;
    for (const auto& [position, gathered_at] : by_position) {
      append(order, gathered_at);
    }
    if (order.size() > 1) {
      reorder_.push_back({dim, std::move(order)});
    }
    set_flat(flat_all_gather(group_, dim, shards, geometry.shape_after(), geometry.ranks.own_rank()));
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    const auto gathered = call::all_gather_along_dim(local.tensor, dim_, group_, sizes_.for_op());
    return {select(gathered, reorder_), false};
  }

 private:
  int64_t dim_;
  ShardSizes sizes_;
  Selection reorder_;  // from rank order to index order
};

// A step that reduces the partials of all its axes together. Beside sums, an average is a sum that is divided
// in the end.
class ReducingStep : public CommunicatingStep {
 public:
  explicit ReducingStep(const StepGeometry& geometry) : CommunicatingStep(geometry) {
    bool is_average = true;
    for (const int64_t axis : geometry.axes()) {
      const auto& partial = geometry.step.before.placements[axis];
      if (!partial.is_partial() || partial.mask != 0) {
        geometry.contradict("what is to be reduced is not partial");
      }
      reduce_op_ = to_string(partial.op);
      is_average = is_average && partial.op == PartialOp::kAvg;
      divisor_ *= partial.op == PartialOp::kAvg ? geometry.mesh.sizes[axis] : 1;
    }
    if (is_average) {
      divisor_ = 1;
    } else if (divisor_ != 1) {
      reduce_op_ = "sum";
    }
  }

  void check(const at::Tensor& tensor) const final {
    check_reduction(tensor, reduce_op_from_name(reduce_op_, kOp), *group_from_ivalue(group_, kOp), kOp);
  }
  at::Tensor finish(at::Tensor reduced) const final {
    return divisor_ == 1 ? reduced : reduced.div(divisor_);
  }

 protected:
  std::string reduce_op_;

 private:
  int64_t divisor_ = 1;
};

class AllReduce final : public ReducingStep {
 public:
  explicit AllReduce(const StepGeometry& geometry) : ReducingStep(geometry) {
    set_flat(flat_all_reduce(group_, reduce_op_));
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    return {finish(call::all_reduce(local.tensor, reduce_op_, group_)), false};
  }
};

class ReduceScatter final : public ReducingStep {
 public:
  ReduceScatter(const StepGeometry& geometry, int64_t dim) : ReducingStep(geometry), dim_(dim) {
    const auto held = geometry.before(dim, geometry.ranks.own_rank());
    Intervals order;
    std::vector<Intervals> shards;
    int64_t scattered = 0;
    for (int64_t rank = 0; rank < geometry.ranks.size(); ++rank) {
      const auto wanted = geometry.after(dim, rank);
      shards.push_back(positions(wanted, held));
      for (const auto& run : shards.back()) {
        append(order, run);
      }
      scattered += num_indices(wanted);
      sizes_.add(num_indices(wanted));
    }
    if (scattered != num_indices(held) || num_indices(order) != scattered) {
      geometry.contradict("the shards after it are not those of what is held before it");
    }
    if (order.size() > 1) {
      reorder_.push_back({dim, std::move(order)});
    }
    set_flat(flat_reduce_scatter(group_, reduce_op_, dim, shards, geometry.shape_before(),
                                 geometry.ranks.own_rank()));
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    return {finish(call::reduce_scatter_along_dim(select(local.tensor, reorder_), reduce_op_, dim_, group_,
                                                  sizes_.for_op())),
            false};
  }

 private:
  int64_t dim_;
  ShardSizes sizes_;
  Selection reorder_;  // from index order to rank order
};

class AllToAll final : public CommunicatingStep {
 public:
  explicit AllToAll(const StepGeometry& geometry)
      : AllToAll(geometry, plan_exchange(geometry.mesh, geometry.step.before, geometry.step.after,
                                         geometry.shape, geometry.ranks)) {}

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    const auto& tensor = local.tensor;
    const bool is_recorded = at::GradMode::is_enabled() && tensor.requires_grad();
    if (!is_recorded && !tensor.is_meta() && !has_active_layers() && !belongs_to_layer(tensor)) {
      return {start(local), false};
    }
    const auto received = call::all_to_all_single(transport_->pack(tensor), received_, sent_, group_);
    return {transport_->unpack(received), false};
  }

 private:
  AllToAll(const StepGeometry& geometry, const Exchange& exchange)
      : CommunicatingStep(geometry),
        transport_(std::make_shared<const BlockTransport>(exchange)),
        sent_(transport_->sent_numels().begin(), transport_->sent_numels().end()),
        received_(transport_->received_numels().begin(), transport_->received_numels().end()) {
    if (!transport_->is_complete()) {
      geometry.contradict("the group's ranks do not hold all that is wanted after it");
    }
    set_flat(flat_all_to_all(group_, exchange));
  }

  // The result of a tensor that nobody watches, which is unpacked at its first use.
  at::Tensor start(const LocalTensor& local) const {
    const BelowAutograd below_autograd;
    auto packed = transport_->pack_plain(local.tensor);
    if (local.may_change && packed.is_alias_of(local.tensor)) {
      packed = contiguous_copy(packed);
    }
    const bool is_view = transport_->unpacks_to_view();
    auto unpacked = is_view ? at::Tensor() : fresh_tensor(transport_->shape_after(), packed);
    auto start = start_all_to_all(packed, transport_->received_numels(), transport_->sent_numels(),
                                  group_from_ivalue(group_, kOp));
    start.buffers.push_back(start.outputs[0]);
    const auto& received = start.buffers.back();
    if (is_view) {
      start.outputs[0] = transport_->unpack(received);
    } else {
      start.outputs[0] = std::move(unpacked);
      start.epilogue = [transport = transport_](const Start& done) {
        transport->unpack_into(done.buffers.back(), done.outputs[0]);
      };
    }
    return as_sole_pending(std::move(start));
  }

  std::shared_ptr<const BlockTransport> transport_;
  std::vector<c10::SymInt> sent_;
  std::vector<c10::SymInt> received_;
};

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

  // Copies at once, as own_result() would copy a view.
  LocalTensor run_plain(const LocalTensor& local, const MaskHooks& masks) const override {
    settle(local.tensor);
    if (!local.tensor.is_contiguous() || local.tensor.is_conj() || local.tensor.is_neg()) {
      return run(local, masks);
    }
    const auto shard = fresh_tensor(shape_after_, local.tensor);
    copy_.run(local.tensor, 0, shard, 0);
    return {shard, false};
  }

 private:
  static Selection selection_of(const StepGeometry& geometry) {
    Selection selection;
    const auto rank = geometry.ranks.own_rank();
    for (int64_t dim = 0; dim < geometry.num_dims(); ++dim) {
      const auto held = geometry.before(dim, rank);
      const auto wanted = geometry.after(dim, rank);
      if (intersection(wanted, held) != wanted) {
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

// To a partial value: the rank's tensor among neutral elements.
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

  // `tensor` with its indices of `dim` at the positions `runs`.
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
    TORCH_CHECK_NOT_IMPLEMENTED(hook,
                                "funcol::redistribute: the plan has a masked partial, but nothing says what "
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
  switch (step.kind) {
    case StepKind::kAllGather:
      if (const auto dim = geometry.common_dim(step.before)) {
        return std::make_unique<AllGather>(geometry, *dim);
      }
      geometry.contradict("it gathers several dims");
    case StepKind::kReduceScatter:
      if (const auto dim = geometry.common_dim(step.after)) {
        return std::make_unique<ReduceScatter>(geometry, *dim);
      }
      geometry.contradict("it scatters several dims");
    case StepKind::kAllReduce:
      return std::make_unique<AllReduce>(geometry);
    case StepKind::kAllToAll:
    case StepKind::kPermute:
      return std::make_unique<AllToAll>(geometry);
    case StepKind::kSplit:
      return std::make_unique<Split>(geometry);
    case StepKind::kToPartial:
    case StepKind::kEmbed:
      return std::make_unique<Embed>(geometry);
    case StepKind::kApplyMask:
    case StepKind::kMask:
      return std::make_unique<Mask>(geometry, step.kind == StepKind::kApplyMask);
  }
  geometry.contradict("unknown kind");
}

}  // namespace funcol
