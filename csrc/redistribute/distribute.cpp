#include "redistribute/distribute.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "async/layers.h"
#include "comm/agreement.h"
#include "layout/shards.h"
#include "ops/wire.h"

namespace funcol {
namespace {

constexpr auto kOp = "distribute_tensor";

bool is_whole_in_parts(PartialOp op) {
  return op == PartialOp::kSum || op == PartialOp::kAvg || op == PartialOp::kMin || op == PartialOp::kMax;
}

// A view of the rank's rows of `tensor`, or a copy where they do not lie together.
at::Tensor shard_of(const at::Tensor& tensor, const Placement& placement, int64_t num_ranks, int64_t rank) {
  const auto dim = placement.dim;
  const auto rows = cut({{0, tensor.size(dim)}}, num_ranks, rank, placement.split_factor);
  if (rows.empty()) {
    return tensor.narrow(dim, 0, 0);
  }
  if (rows.size() == 1) {
    return tensor.narrow(dim, rows[0].begin, rows[0].size);
  }
  std::vector<at::Tensor> parts;
  parts.reserve(rows.size());
  for (const auto& part : rows) {
    parts.push_back(tensor.narrow(dim, part.begin, part.size));
  }
  return at::cat(parts, dim);
}

// `shard`, contiguous, with zeros behind it up to `length` along `dim`.
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
  Distributor(const Distribution& how, const std::vector<GroupOfAxis>& groups)
      : how_(how), groups_(groups), source_(how.source.value_or(0)) {}

  at::Tensor run(const at::Tensor& whole) const {
    auto local = whole;
    for (size_t axis = 0; axis < num_axes(); ++axis) {
      if (how_.placements[axis].is_shard()) {
        local = how_.communicates() ? scattered(local, axis)
                                    : shard_of(local, how_.placements[axis], num_ranks(axis), rank(axis));
      }
    }
    local = alone(local, whole);
    for (size_t axis = 0; axis < num_axes(); ++axis) {
      if (!how_.placements[axis].is_shard()) {
        local = replicated(local, axis);
      }
    }
    return local;
  }

 private:
  size_t num_axes() const { return how_.placements.size(); }
  int64_t num_ranks(size_t axis) const { return how_.mesh.sizes[axis]; }
  int64_t rank(size_t axis) const { return how_.coordinate[axis]; }
  // Where along the axis a rank of its group is: groups count their ranks as the world does, meshes need not.
  int64_t place(size_t axis, int64_t rank_of_group) const {
    const auto& places = groups_[axis].places;
    return places.empty() ? rank_of_group : places[rank_of_group];
  }
  bool sends(size_t axis) const { return rank(axis) == place(axis, source_); }

  // Memory of its own for what was cut out of `whole`, laid out like that unless replicas follow, which are
  // contiguous.
  at::Tensor alone(const at::Tensor& cut_out, const at::Tensor& whole) const {
    const auto& placements = how_.placements;
    const auto num_cuts = std::ranges::count_if(placements, [](const auto& one) { return one.is_shard(); });
    if (num_cuts == 0 || how_.communicates()) {
      return cut_out.contiguous();
    }
    if (num_cuts < std::ssize(placements)) {
      return cut_out.clone(at::MemoryFormat::Contiguous);
    }
    return cut_out.is_alias_of(whole) ? cut_out.clone() : cut_out;
  }

  at::Tensor scattered(const at::Tensor& tensor, size_t axis) const {
    const auto& placement = how_.placements[axis];
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
          const auto shard = shard_of(tensor, placement, num_ranks(axis), place(axis, rank));
          shards.push_back(wire_for_movement(padded(shard, placement.dim, length), group));
        }
      }
      c10d::ScatterOptions options;
      options.rootRank = source_;
      options.asyncOp = false;
      finish(group.scatter(outputs, inputs, options));
    }
    const auto mine = num_indices(
        cut({{0, tensor.size(placement.dim)}}, num_ranks(axis), rank(axis), placement.split_factor));
    return mine == length ? received : received.narrow(placement.dim, 0, mine).contiguous();
  }

  at::Tensor replicated(const at::Tensor& local, size_t axis) const {
    if (!groups_.empty()) {
      auto& group = agreed_group(axis, local);
      std::vector<at::Tensor> wires{wire_for_movement(local, group)};
      c10d::BroadcastOptions options;
      options.rootRank = source_;
      options.asyncOp = false;
      finish(group.broadcast(wires, options));
    }
    const auto& placement = how_.placements[axis];
    return placement.is_partial() && placement.op == PartialOp::kSum ? local / num_ranks(axis) : local;
  }

  // Raises where agreement is checked and the ranks are not about to do the same.
  c10d::ProcessGroup& agreed_group(size_t axis, const at::Tensor& tensor) const {
    auto& group = *groups_[axis].group;
    if (agreement_is_checked() && !has_active_layers()) {
      const auto arguments = c10::str(to_string(how_.placements[axis]), ", src_data_rank=", source_);
      agree(group, kOp, arguments, describe_tensors(tensor));
    }
    return group;
  }

  // Without a Work the backend has waited itself.
  static void finish(const c10::intrusive_ptr<c10d::Work>& work) {
    if (work) {
      work->wait();
    }
  }

  const Distribution& how_;
  const std::vector<GroupOfAxis>& groups_;
  int64_t source_;  // where something is sent
};

}  // namespace

void check(const Distribution& how, const at::Tensor& whole) {
  for (size_t axis = 0; axis < how.placements.size(); ++axis) {
    const auto& placement = how.placements[axis];
    const auto name = how.mesh.name(static_cast<int64_t>(axis));
    TORCH_CHECK_VALUE(!placement.is_shard() || (placement.dim >= 0 && placement.dim < whole.dim()),
                      "funcol::", kOp, ": ", to_string(placement), " on mesh axis ", name,
                      " cuts a dim that a tensor of shape ", whole.sizes(), " has not. Pass a dim below ",
                      whole.dim(), ".");
    TORCH_CHECK_VALUE(!placement.is_partial() || is_whole_in_parts(placement.op), "funcol::", kOp, ": ",
                      to_string(placement), " on mesh axis ", name,
                      ": a tensor has no parts of which this reduction makes it. Pass sum, avg, min or max.");
    TORCH_CHECK_VALUE(!how.source.has_value() || (*how.source >= 0 && *how.source < how.mesh.sizes[axis]),
                      "funcol::", kOp, ": src_data_rank is ", how.source.value_or(0), ", but mesh axis ",
                      name, " has ", how.mesh.sizes[axis],
                      " ranks. It is a rank of each axis's group; pass one that all of them have, or None.");
  }
}

at::Tensor distribute(const at::Tensor& whole, const Distribution& how,
                      const std::vector<GroupOfAxis>& groups) {
  return Distributor(how, groups).run(whole);
}

}  // namespace funcol
