#include "transfer/distribute.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "async/dispatch_modes.h"
#include "comm/agreement.h"
#include "comm/process_group.h"
#include "layout/shards.h"
#include "ops/backend_tensor.h"
#include "transfer/op_names.h"
#include "transfer/selection.h"

namespace funcol {
namespace {

bool can_split(PartialOp op) {
  return op == PartialOp::kSum || op == PartialOp::kAvg || op == PartialOp::kMin || op == PartialOp::kMax;
}

// Returns a view of the rank's shard of `tensor`, or a copy if the parts of the shard do not lie together.
at::Tensor shard_of(const at::Tensor& tensor, const Placement& placement, int64_t num_ranks, int64_t rank) {
  const auto dim = placement.dim;
  return select(tensor,
                {{dim, funcol::cut({{0, tensor.size(dim)}}, num_ranks, rank, placement.split_factor)}});
}

// Returns `shard`, contiguous, padded with zeros up to `length` along `dim`.
at::Tensor padded(const at::Tensor& shard, int64_t dim, int64_t length) {
  if (shard.size(dim) == length) {
    return shard.contiguous();
  }
  auto sizes = shard.sizes().vec();
  sizes[dim] = length;
  auto result = at::zeros(sizes, shard.options());
  result.narrow(dim, 0, shard.size(dim)).copy_(shard);
  return result;
}

class Distributor {
 public:
  Distributor(const Distribution& distribution, const std::vector<AxisGroup>& axis_groups)
      : distribution_(distribution), axis_groups_(axis_groups), source_(distribution.source.value_or(0)) {
    for (const auto& axis_group : axis_groups) {
      check_is_current(axis_group.ref, kDistributeTensor);
      groups_.push_back(group_from_ivalue(axis_group.group, kDistributeTensor));
    }
  }

  at::Tensor run(const at::Tensor& full) const {
    auto local = full;
    for (size_t axis = 0; axis < num_axes(); ++axis) {
      if (distribution_.placements[axis].is_shard()) {
        local = distribution_.communicates()
                    ? scattered(local, axis)
                    : shard_of(local, distribution_.placements[axis], num_ranks(axis), rank(axis));
      }
    }
    local = in_own_memory(local, full);
    for (size_t axis = 0; axis < num_axes(); ++axis) {
      if (!distribution_.placements[axis].is_shard()) {
        local = replicated(local, axis);
      }
    }
    return local;
  }

 private:
  size_t num_axes() const { return distribution_.placements.size(); }
  int64_t num_ranks(size_t axis) const { return distribution_.mesh.sizes[axis]; }
  int64_t rank(size_t axis) const { return distribution_.coordinate[axis]; }
  // Returns the index along the axis of a group rank. Groups number ranks like the world, meshes need not.
  int64_t index_of(size_t axis, int64_t group_rank) const {
    const auto& members = axis_groups_[axis].members;
    return members.empty() ? group_rank : members[group_rank];
  }
  bool sends(size_t axis) const { return rank(axis) == index_of(axis, source_); }

  // Returns `cut_out`, in memory of its own if an axis cuts: with its strides in `full`, or contiguous if
  // replicas follow.
  at::Tensor in_own_memory(const at::Tensor& cut_out, const at::Tensor& full) const {
    const auto& placements = distribution_.placements;
    const auto num_cuts = std::ranges::count_if(placements, [](const auto& one) { return one.is_shard(); });
    if (num_cuts == 0 || distribution_.communicates()) {
      return cut_out.contiguous();
    }
    if (num_cuts < std::ssize(placements)) {
      return cut_out.clone(at::MemoryFormat::Contiguous);
    }
    return cut_out.is_alias_of(full) ? cut_out.clone() : cut_out;
  }

  at::Tensor scattered(const at::Tensor& tensor, size_t axis) const {
    const auto& placement = distribution_.placements[axis];
    const auto length = longest_shard(tensor.size(placement.dim), num_ranks(axis), placement.split_factor);
    auto sizes = tensor.sizes().vec();
    sizes[placement.dim] = length;
    const auto received = at::empty(sizes, tensor.options());
    if (!groups_.empty()) {
      auto& group = agreed_group(axis, tensor);
      std::vector<at::Tensor> outputs{wire_for_movement(received, group)};
      std::vector<std::vector<at::Tensor>> inputs;
      if (sends(axis)) {
        auto& shards = inputs.emplace_back();
        for (int64_t rank = 0; rank < num_ranks(axis); ++rank) {
          const auto shard = shard_of(tensor, placement, num_ranks(axis), index_of(axis, rank));
          shards.push_back(wire_for_movement(padded(shard, placement.dim, length), group));
        }
      }
      c10d::ScatterOptions options;
      options.rootRank = source_;
      options.asyncOp = false;
      wait_for(group.scatter(outputs, inputs, options));
    }
    const auto mine = num_indices(
        funcol::cut({{0, tensor.size(placement.dim)}}, num_ranks(axis), rank(axis), placement.split_factor));
    return mine == length ? received : received.narrow(placement.dim, 0, mine).contiguous();
  }

  at::Tensor replicated(const at::Tensor& local, size_t axis) const {
    if (!groups_.empty()) {
      auto& group = agreed_group(axis, local);
      std::vector<at::Tensor> wires{wire_for_movement(local, group)};
      c10d::BroadcastOptions options;
      options.rootRank = source_;
      options.asyncOp = false;
      wait_for(group.broadcast(wires, options));
    }
    const auto& placement = distribution_.placements[axis];
    return placement.is_partial() && placement.op == PartialOp::kSum ? local / num_ranks(axis) : local;
  }

  // Returns the axis's group. Raises if agreement is checked and the ranks are about to do different things.
  c10d::ProcessGroup& agreed_group(size_t axis, const at::Tensor& tensor) const {
    auto& group = *groups_[axis];
    if (agreement_is_checked() && !has_active_layers()) {
      const auto arguments = c10::str(to_string(distribution_.placements[axis]), ", src_data_rank=", source_);
      agree(group, kDistributeTensor, arguments, describe_tensors(tensor));
    }
    return group;
  }

  // Waits for `work`, unless it is null: the backend has then waited itself.
  static void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
    if (work) {
      work->wait();
    }
  }

  const Distribution& distribution_;
  const std::vector<AxisGroup>& axis_groups_;
  std::vector<GroupPtr> groups_;
  int64_t source_;  // meaningless if nothing is sent
};

}  // namespace

void check(const Distribution& distribution, const at::Tensor& full) {
  for (size_t axis = 0; axis < distribution.placements.size(); ++axis) {
    const auto& placement = distribution.placements[axis];
    const auto name = distribution.mesh.name(static_cast<int64_t>(axis));
    TORCH_CHECK_VALUE(!placement.is_shard() || (placement.dim >= 0 && placement.dim < full.dim()),
                      "funcol::", kDistributeTensor, ": ", to_string(placement), " on mesh axis ", name,
                      " cuts a dim that a tensor of shape ", full.sizes(), " has not. Pass a dim below ",
                      full.dim(), ".");
    TORCH_CHECK_VALUE(!placement.is_partial() || can_split(placement.op), "funcol::", kDistributeTensor, ": ",
                      to_string(placement), " on mesh axis ", name,
                      ": a tensor cannot be split for this reduction. Pass sum, avg, min or max.");
    TORCH_CHECK_VALUE(!distribution.source.has_value() ||
                          (*distribution.source >= 0 && *distribution.source < distribution.mesh.sizes[axis]),
                      "funcol::", kDistributeTensor, ": src_data_rank is ", distribution.source.value_or(0),
                      ", but mesh axis ", name, " has ", distribution.mesh.sizes[axis],
                      " ranks. It is a rank of each axis's group; pass one that all of them have, or None.");
  }
}

at::Tensor distribute(const at::Tensor& full, const Distribution& distribution,
                      const std::vector<AxisGroup>& groups) {
  return Distributor(distribution, groups).run(full);
}

}  // namespace funcol
