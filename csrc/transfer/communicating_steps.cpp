#include "transfer/communicating_steps.h"

#include <ATen/core/grad_mode.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "async/dispatch_modes.h"
#include "comm/orphaned_works.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "transfer/block_transport.h"
#include "transfer/op_names.h"
#include "transfer/selection.h"

namespace funcol {
namespace {

using c10::IValue;

// The size of each rank's shard, as the argument split_sizes of the ops: nullopt if all are equal.
class ShardSizes {
 public:
  void add(int64_t size) {
    is_equal_ = is_equal_ && (sizes_.empty() || sizes_.front() == size);
    sizes_.emplace_back(size);
  }
  at::OptionalSymIntArrayRef for_op() const {
    return is_equal_ ? at::OptionalSymIntArrayRef() : at::OptionalSymIntArrayRef(sizes_);
  }
  at::OptionalIntArrayRef for_start() const {
    return is_equal_ ? at::OptionalIntArrayRef()
                     : at::OptionalIntArrayRef(C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(sizes_)));
  }

 private:
  std::vector<c10::SymInt> sizes_;
  bool is_equal_ = true;
};

// Waits for a collective, and returns its output.
at::Tensor wait_for_output(StartedCollective start) {
  sweep_some_orphans();
  auto output = start.outputs[0];
  make_pending_collective(std::move(start))->settle();
  return output;
}

class CommunicatingStep : public LocalStep {
 public:
  explicit CommunicatingStep(const StepGeometry& geometry)
      : group_(geometry.group->group),
        description_(
            c10::str(to_string(geometry.step, geometry.mesh), " of ", at::IntArrayRef(geometry.shape))) {}

  std::shared_ptr<const PackedExchange> flat() const final {
    std::call_once(flat_is_made_, [this] {
      auto flat = make_flat_();
      flat.description = description_;
      flat_ = std::make_shared<const PackedExchange>(std::move(flat));
    });
    return flat_;
  }
  std::string_view signature() const final { return signature_; }

 protected:
  // Sets how flat() is made when a batch first needs it.
  void set_flat(std::string signature, std::function<PackedExchange()> make) {
    signature_ = std::move(signature);
    make_flat_ = std::move(make);
  }

  IValue group_;

 private:
  std::string description_;
  std::string signature_;
  std::function<PackedExchange()> make_flat_;
  mutable std::once_flag flat_is_made_;
  mutable std::shared_ptr<const PackedExchange> flat_;
};

class AllGather final : public CommunicatingStep {
 public:
  AllGather(const StepGeometry& geometry, int64_t dim) : CommunicatingStep(geometry), dim_(dim) {
    std::map<int64_t, Interval> by_position;
    std::vector<Intervals> shards;
    const auto own_rank = geometry.ranks.own_rank();
    const auto wanted = geometry.after(dim, own_rank);
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
    set_flat(signature_of(StepKind::kAllGather, group_),
             [group = group_, dim, shards = std::move(shards), shape = geometry.shape_after(), own_rank] {
               return packed_all_gather(group, dim, shards, shape, own_rank);
             });
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    const auto gathered = call::all_gather_along_dim(local.tensor, dim_, group_, sizes_.for_op());
    return {select(gathered, reorder_), false};
  }

  LocalTensor run_now(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    const auto group = group_from_ivalue(group_, "all_gather_tensor");
    const auto gathered =
        wait_for_output(start_uneven_all_gather(local.tensor, dim_, group, sizes_.for_start()));
    return {select(gathered, reorder_), false};
  }

 private:
  int64_t dim_;
  ShardSizes sizes_;
  Selection reorder_;  // from rank order to index order
};

// A step that reduces the partials of all its axes together. Among sums, an average is a sum that is divided
// at the end.
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
    check_reduction(tensor, reduce_op_from_name(reduce_op_, kRedistribute),
                    *group_from_ivalue(group_, kRedistribute), kRedistribute);
  }
  at::Tensor complete(at::Tensor reduced) const final {
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
    set_flat(signature_of(StepKind::kAllReduce, group_, reduce_op_),
             [group = group_, num_ranks = geometry.ranks.size(), reduce_op = reduce_op_] {
               return packed_all_reduce(group, num_ranks, reduce_op);
             });
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    return {complete(call::all_reduce(local.tensor, reduce_op_, group_)), false};
  }

  LocalTensor run_now(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    constexpr auto kName = "all_reduce";
    return {complete(wait_for_output(start_all_reduce(local.tensor, reduce_op_from_name(reduce_op_, kName),
                                                      group_from_ivalue(group_, kName)))),
            false};
  }
};

class ReduceScatter final : public ReducingStep {
 public:
  ReduceScatter(const StepGeometry& geometry, int64_t dim) : ReducingStep(geometry), dim_(dim) {
    const auto own_rank = geometry.ranks.own_rank();
    const auto held = geometry.before(dim, own_rank);
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
    set_flat(signature_of(StepKind::kReduceScatter, group_, reduce_op_),
             [group = group_, reduce_op = reduce_op_, dim, shards = std::move(shards),
              shape = geometry.shape_before(),
              own_rank] { return packed_reduce_scatter(group, reduce_op, dim, shards, shape, own_rank); });
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    return {complete(call::reduce_scatter_along_dim(select(local.tensor, reorder_), reduce_op_, dim_, group_,
                                                    sizes_.for_op())),
            false};
  }

  LocalTensor run_now(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    constexpr auto kName = "reduce_scatter_tensor";
    return {complete(wait_for_output(start_uneven_reduce_scatter(
                select(local.tensor, reorder_), reduce_op_from_name(reduce_op_, kName), dim_,
                group_from_ivalue(group_, kName), sizes_.for_start()))),
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
      : CommunicatingStep(geometry),
        transport_(std::make_shared<const BlockTransport>(plan_exchange(
            geometry.mesh, geometry.step.before, geometry.step.after, geometry.shape, geometry.ranks))),
        sent_(transport_->sent_numels().begin(), transport_->sent_numels().end()),
        received_(transport_->received_numels().begin(), transport_->received_numels().end()) {
    if (!transport_->is_complete()) {
      geometry.contradict("the group's ranks do not hold all that is wanted after it");
    }
    set_flat(signature_of(StepKind::kAllToAll, group_), [group = group_, transport = transport_] {
      return packed_all_to_all(group, transport->exchange());
    });
  }

  LocalTensor run(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    const auto& tensor = local.tensor;
    const bool is_recorded = at::GradMode::is_enabled() && tensor.requires_grad();
    if (!is_recorded && !tensor.is_meta() && !has_active_layers() && !belongs_to_layer(tensor)) {
      return {as_sole_pending(start(local)), false};
    }
    const auto received = call::all_to_all_single(transport_->pack(tensor), received_, sent_, group_);
    return {transport_->unpack(received), false};
  }

  LocalTensor run_now(const LocalTensor& local, const MaskHooks& /*masks*/) const override {
    return {wait_for_output(start(local)), false};
  }

 private:
  // Starts the exchange of a tensor that no layer observes, which is unpacked when it is settled.
  StartedCollective start(const LocalTensor& local) const {
    const BelowAutograd below_autograd;
    auto packed = transport_->pack_plain(local.tensor);
    if (local.may_change && packed.is_alias_of(local.tensor)) {
      packed = contiguous_copy(packed);
    }
    const bool is_view = transport_->unpacks_to_view();
    auto unpacked = is_view ? at::Tensor() : fresh_tensor(transport_->shape_after(), packed);
    auto start = start_all_to_all(packed, transport_->received_numels(), transport_->sent_numels(),
                                  group_from_ivalue(group_, kRedistribute));
    start.buffers.push_back(start.outputs[0]);
    const auto& received = start.buffers.back();
    if (is_view) {
      start.outputs[0] = transport_->unpack(received);
    } else {
      start.outputs[0] = std::move(unpacked);
      start.epilogue = [transport = transport_](const StartedCollective& done) {
        transport->unpack_into(done.buffers.back(), done.outputs[0]);
      };
    }
    return start;
  }

  std::shared_ptr<const BlockTransport> transport_;
  std::vector<c10::SymInt> sent_;
  std::vector<c10::SymInt> received_;
};

}  // namespace

std::unique_ptr<LocalStep> make_communicating_step(const StepGeometry& geometry) {
  switch (geometry.step.kind) {
    case StepKind::kAllGather:
      if (const auto dim = geometry.common_dim(geometry.step.before)) {
        return std::make_unique<AllGather>(geometry, *dim);
      }
      geometry.contradict("it gathers several dims");
    case StepKind::kReduceScatter:
      if (const auto dim = geometry.common_dim(geometry.step.after)) {
        return std::make_unique<ReduceScatter>(geometry, *dim);
      }
      geometry.contradict("it scatters several dims");
    case StepKind::kAllReduce:
      return std::make_unique<AllReduce>(geometry);
    case StepKind::kAllToAll:
    case StepKind::kPermute:
      return std::make_unique<AllToAll>(geometry);
    default:
      geometry.contradict("it sends nothing");
  }
}

}  // namespace funcol
