#include "redistribute/local_steps.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
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

// A step together with what it means for one rank of its group.
struct View {
  View(const Plan& plan, const Step& step, const AxisGroups& groups, const Coordinate& coordinate)
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

// One size per rank as the ops take it: none where all are equal.
class SplitSizes {
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

class AllGather final : public LocalStep {
 public:
  AllGather(const View& view, int64_t dim) : group_(view.group->group), dim_(dim) {
    struct Gathered {
      int64_t wanted_at;
      Interval place;
    };
    std::vector<Gathered> runs;
    std::vector<Intervals> shards;
    const auto wanted = view.after(dim, view.ranks.own_rank());
    int64_t gathered = 0;
    for (int64_t rank = 0; rank < view.ranks.size(); ++rank) {
      const auto held = view.before(dim, rank);
      int64_t seen = gathered;
      shards.push_back(positions(held, wanted));
      for (const auto& place : shards.back()) {
        runs.push_back({place.begin, {seen, place.size}});
        seen += place.size;
      }
      gathered += num_indices(held);
      if (seen != gathered) {
        view.contradict("more is gathered than the layout after it holds");
      }
      sizes_.add(num_indices(held));
    }
    if (gathered != num_indices(wanted)) {
      view.contradict("less is gathered than the layout after it holds");
    }
    std::ranges::sort(runs, [](const Gathered& a, const Gathered& b) { return a.wanted_at < b.wanted_at; });
    Intervals order;
    for (const auto& run : runs) {
      append(order, run.place);
    }
    if (order.size() > 1) {
      reorder_.push_back({dim, std::move(order)});
    }
    flat_ = std::make_shared<const FlatStep>(
        flat_all_gather(group_, dim, shards, view.shape_after(), view.ranks.own_rank()));
  }

  std::shared_ptr<const FlatStep> flat() const override { return flat_; }

  Value run(const Value& value, const MaskHooks& /*masks*/) const override {
    const auto gathered = call::all_gather_along_dim(value.tensor, dim_, group_, sizes_.for_op());
    return {select(gathered, reorder_), false};
  }

 private:
  IValue group_;
  int64_t dim_;
  SplitSizes sizes_;
  Selection reorder_;  // from rank order to index order
  std::shared_ptr<const FlatStep> flat_;
};

// How the axes' partials are reduced together: an average is a sum, divided in the end where others are sums.
struct Reduction {
  explicit Reduction(const View& view) {
    bool is_average = true;
    for (const int64_t axis : view.axes()) {
      const auto& partial = view.step.before.placements[axis];
      if (!partial.is_partial() || partial.mask != 0) {
        view.contradict("what is to be reduced is not partial");
      }
      name = to_string(partial.op);
      is_average = is_average && partial.op == PartialOp::kAvg;
      divisor *= partial.op == PartialOp::kAvg ? view.mesh.sizes[axis] : 1;
    }
    if (is_average) {
      divisor = 1;
    } else if (divisor != 1) {
      name = "sum";
    }
  }

  void check(const at::Tensor& tensor, const IValue& group) const {
    check_reduction(tensor, reduce_op_from_name(name, kOp), *group_from_ivalue(group, kOp), kOp);
  }
  at::Tensor finish(const at::Tensor& reduced) const { return divisor == 1 ? reduced : reduced.div(divisor); }

  std::string name;
  int64_t divisor = 1;
};

class AllReduce final : public LocalStep {
 public:
  explicit AllReduce(const View& view)
      : group_(view.group->group),
        reduction_(view),
        flat_(std::make_shared<const FlatStep>(flat_all_reduce(group_, reduction_.name))) {}

  void check(const at::Tensor& tensor) const override { reduction_.check(tensor, group_); }
  std::shared_ptr<const FlatStep> flat() const override { return flat_; }
  at::Tensor finish(at::Tensor reduced) const override { return reduction_.finish(reduced); }

  Value run(const Value& value, const MaskHooks& /*masks*/) const override {
    return {reduction_.finish(call::all_reduce(value.tensor, reduction_.name, group_)), false};
  }

 private:
  IValue group_;
  Reduction reduction_;
  std::shared_ptr<const FlatStep> flat_;
};

class ReduceScatter final : public LocalStep {
 public:
  ReduceScatter(const View& view, int64_t dim) : group_(view.group->group), dim_(dim), reduction_(view) {
    const auto held = view.before(dim, view.ranks.own_rank());
    Intervals order;
    std::vector<Intervals> shards;
    int64_t scattered = 0;
    for (int64_t rank = 0; rank < view.ranks.size(); ++rank) {
      const auto wanted = view.after(dim, rank);
      shards.push_back(positions(wanted, held));
      for (const auto& run : shards.back()) {
        append(order, run);
      }
      scattered += num_indices(wanted);
      sizes_.add(num_indices(wanted));
    }
    if (scattered != num_indices(held) || num_indices(order) != scattered) {
      view.contradict("the shards after it are not those of what is held before it");
    }
    if (order.size() > 1) {
      reorder_.push_back({dim, std::move(order)});
    }
    flat_ = std::make_shared<const FlatStep>(flat_reduce_scatter(group_, reduction_.name, dim, shards,
                                                                 view.shape_before(), view.ranks.own_rank()));
  }

  void check(const at::Tensor& tensor) const override { reduction_.check(tensor, group_); }
  std::shared_ptr<const FlatStep> flat() const override { return flat_; }
  at::Tensor finish(at::Tensor reduced) const override { return reduction_.finish(reduced); }

  Value run(const Value& value, const MaskHooks& /*masks*/) const override {
    const auto scattered = call::reduce_scatter_along_dim(select(value.tensor, reorder_), reduction_.name,
                                                          dim_, group_, sizes_.for_op());
    return {reduction_.finish(scattered), false};
  }

 private:
  IValue group_;
  int64_t dim_;
  Reduction reduction_;
  SplitSizes sizes_;
  Selection reorder_;  // from index order to rank order
  std::shared_ptr<const FlatStep> flat_;
};

class AllToAll final : public LocalStep {
 public:
  explicit AllToAll(const View& view)
      : AllToAll(view, plan_exchange(view.mesh, view.step.before, view.step.after, view.shape, view.ranks)) {}

  std::shared_ptr<const FlatStep> flat() const override { return flat_; }

  Value run(const Value& value, const MaskHooks& /*masks*/) const override {
    const auto& tensor = value.tensor;
    const bool is_recorded = at::GradMode::is_enabled() && tensor.requires_grad();
    if (!is_recorded && !tensor.is_meta() && !has_active_layers() && !belongs_to_layer(tensor)) {
      return {start(value), false};
    }
    const auto received = call::all_to_all_single(transport_->pack(tensor), received_, sent_, group_);
    return {transport_->unpack(received), false};
  }

 private:
  AllToAll(const View& view, const Exchange& exchange)
      : group_(view.group->group),
        transport_(std::make_shared<const BlockTransport>(exchange)),
        flat_(std::make_shared<const FlatStep>(flat_all_to_all(group_, exchange))),
        sent_(transport_->sent_numels().begin(), transport_->sent_numels().end()),
        received_(transport_->received_numels().begin(), transport_->received_numels().end()) {
    if (!transport_->is_complete()) {
      view.contradict("the group's ranks do not hold all that is wanted after it");
    }
  }

  // Nobody watches: what was received is unpacked at the first use of the result.
  at::Tensor start(const Value& local) const {
    const BelowAutograd below_autograd;
    auto packed = transport_->pack_plain(local.tensor);
    if (local.may_change && packed.is_alias_of(local.tensor)) {
      packed = contiguous_copy(packed);
    }
    auto start = start_all_to_all(packed, transport_->received_numels(), transport_->sent_numels(),
                                  group_from_ivalue(group_, kOp));
    start.buffers.push_back(start.outputs[0]);
    const auto& received = start.buffers.back();
    if (transport_->unpacks_to_view()) {
      start.outputs[0] = transport_->unpack(received);
    } else {
      start.outputs[0] = fresh_tensor(transport_->shape_after(), received);
      start.epilogue = [transport = transport_](const Start& done) {
        transport->unpack_into(done.buffers.back(), done.outputs[0]);
      };
    }
    return as_sole_pending(std::move(start));
  }

  IValue group_;
  std::shared_ptr<const BlockTransport> transport_;
  std::shared_ptr<const FlatStep> flat_;
  std::vector<c10::SymInt> sent_;
  std::vector<c10::SymInt> received_;
};

class Split final : public LocalStep {
 public:
  explicit Split(const View& view) {
    const auto rank = view.ranks.own_rank();
    for (int64_t dim = 0; dim < view.num_dims(); ++dim) {
      const auto held = view.before(dim, rank);
      const auto wanted = view.after(dim, rank);
      if (intersection(wanted, held) != wanted) {
        view.contradict("it wants what the rank does not hold");
      }
      select_dim(dim, wanted, held, selection_);
    }
    copy_.emplace(selection_copy(selection_, view.shape_before()));
    shape_after_ = view.shape_after();
  }

  Value run(const Value& value, const MaskHooks& /*masks*/) const override {
    const bool is_callers = value.is_callers && !select_copies(selection_);
    return {select(value.tensor, selection_), is_callers, is_callers && value.may_change};
  }

  // Copied at once: a view would be later.
  Value run_plain(const Value& value, const MaskHooks& masks) const override {
    settle(value.tensor);
    if (!copy_ || !value.tensor.is_contiguous() || value.tensor.is_conj() || value.tensor.is_neg()) {
      return run(value, masks);
    }
    const auto shard = fresh_tensor(shape_after_, value.tensor);
    copy_->run(value.tensor, 0, shard, 0);
    return {shard, false};
  }

 private:
  Selection selection_;
  std::optional<BoxCopy> copy_;
  std::vector<int64_t> shape_after_;
};

// To a partial value: the rank's tensor among neutral elements.
class Embed final : public LocalStep {
 public:
  explicit Embed(const View& view) : shape_(view.shape.size()) {
    const auto rank = view.ranks.own_rank();
    for (const int64_t axis : view.axes()) {
      const auto& before = view.step.before.placements[axis];
      const auto& after = view.step.after.placements[axis];
      if (!after.is_partial() || before.is_partial()) {
        view.contradict("it makes no partial value");
      }
      op_ = after.op;
      // Of those that replicate, one holds the value where several would add up.
      const bool adds_up = after.op == PartialOp::kSum || after.op == PartialOp::kProduct ||
                           after.op == PartialOp::kBor || after.op == PartialOp::kBxor;
      is_neutral_ = is_neutral_ || (before.is_replicate() && adds_up && view.ranks.own()[axis] != 0);
      if (before.is_shard() && after.op == PartialOp::kAvg) {
        view.contradict("an average has no neutral element to put around a shard");
      }
    }
    for (int64_t dim = 0; dim < view.num_dims(); ++dim) {
      const auto held = view.before(dim, rank);
      const auto wanted = view.after(dim, rank);
      shape_[dim] = num_indices(wanted);
      if (held != wanted) {
        margins_.push_back({dim, positions(held, wanted)});
      }
    }
  }

  void check(const at::Tensor& tensor) const override {
    if (is_neutral_ || !margins_.empty()) {
      neutral_element(op_, tensor.scalar_type());
    }
  }

  Value run(const Value& value, const MaskHooks& /*masks*/) const override {
    if (is_neutral_) {
      return {neutral(value.tensor, shape_), false};
    }
    auto tensor = value.tensor;
    for (const auto& [dim, runs] : margins_) {
      tensor = embed(tensor, dim, runs);
    }
    const bool is_callers = value.is_callers && margins_.empty();
    return {tensor, is_callers, is_callers && value.may_change};
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
  Selection margins_;  // where what the rank holds lies in what it makes
};

class Mask final : public LocalStep {
 public:
  Mask(const View& view, bool applies) : applies_(applies) {
    for (int64_t axis = 0; axis < view.mesh.num_axes(); ++axis) {
      if (contains(view.step.axes, axis)) {
        axes_.push_back(axis);
      }
    }
  }

  Value run(const Value& value, const MaskHooks& masks) const override {
    auto tensor = value.tensor;
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
  const View view(plan, step, groups, coordinate);
  switch (step.kind) {
    case StepKind::kAllGather:
      if (const auto dim = view.common_dim(step.before)) {
        return std::make_unique<AllGather>(view, *dim);
      }
      view.contradict("it gathers several dims");
    case StepKind::kReduceScatter:
      if (const auto dim = view.common_dim(step.after)) {
        return std::make_unique<ReduceScatter>(view, *dim);
      }
      view.contradict("it scatters several dims");
    case StepKind::kAllReduce:
      return std::make_unique<AllReduce>(view);
    case StepKind::kAllToAll:
    case StepKind::kPermute:
      return std::make_unique<AllToAll>(view);
    case StepKind::kSplit:
      return std::make_unique<Split>(view);
    case StepKind::kToPartial:
    case StepKind::kEmbed:
      return std::make_unique<Embed>(view);
    case StepKind::kApplyMask:
    case StepKind::kMask:
      return std::make_unique<Mask>(view, step.kind == StepKind::kApplyMask);
  }
  view.contradict("unknown kind");
}

}  // namespace funcol
