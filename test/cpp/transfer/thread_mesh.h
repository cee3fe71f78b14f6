// A mesh whose ranks are threads, and the tensors that they hold.
#pragma once

#include <ATen/ATen.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "async/async_tensor.h"
#include "layout/shards.h"
#include "support/thread_ranks.h"
#include "transfer/group_ranks.h"

namespace funcol::test {

// The tensor of the rank at `coordinate`, of which partial values add up: the others hold zeros.
inline at::Tensor shard(const at::Tensor& whole, const Layout& layout, const Mesh& mesh,
                        const Coordinate& coordinate) {
  at::Tensor held = whole;
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    std::vector<at::Tensor> runs{held.narrow(dim, 0, 0)};
    for (const auto& run : local_indices(layout, mesh, dim, whole.size(dim), coordinate)) {
      runs.push_back(held.narrow(dim, run.begin, run.size));
    }
    held = at::cat(runs, dim);
  }
  for (size_t axis = 0; axis < coordinate.size(); ++axis) {
    const auto& placement = layout.placements[axis];
    if (placement.is_partial() && placement.op == PartialOp::kSum && coordinate[axis] != 0) {
      held = at::zeros_like(held);
    }
  }
  return held;
}

class ThreadMesh {
 public:
  // `members` says where along an axis the ranks of its group are, as AxisGroup has it.
  explicit ThreadMesh(Mesh mesh, const std::map<AxisSet, std::vector<int64_t>>& members = {})
      : mesh_(std::move(mesh)) {
    const AxisSet all = (AxisSet{1} << mesh_.sizes.size()) - 1;
    const GroupRanks ranks(mesh_, all, Coordinate(mesh_.sizes.size(), 0));
    std::map<std::pair<AxisSet, Coordinate>, std::shared_ptr<Meeting>> meetings;
    for (int64_t rank = 0; rank < ranks.size(); ++rank) {
      coordinates_.push_back(ranks.coordinate(rank));
      auto& groups = groups_.emplace_back();
      for (AxisSet axes = 1; axes <= all; ++axes) {
        const auto found = members.find(axes);
        const auto of_group = found == members.end() ? std::vector<int64_t>() : found->second;
        const GroupRanks group_ranks(mesh_, axes, coordinates_.back(), of_group);
        auto& meeting = meetings[{axes, group_ranks.coordinate(0)}];
        if (!meeting) {
          meeting = std::make_shared<Meeting>(group_ranks.size());
          meetings_.push_back(meeting);
        }
        groups[axes] = {c10::IValue(group_of(group_ranks, meeting)), of_group};
      }
    }
  }

  const Mesh& mesh() const { return mesh_; }
  const std::vector<Coordinate>& coordinates() const { return coordinates_; }
  const AxisGroups& groups(size_t rank) const { return groups_[rank]; }

  using Tensors = std::vector<at::Tensor>;
  using Body = std::function<Tensors(const Coordinate& coordinate, const AxisGroups& groups)>;

  // The results of `body` on every rank, waited for. Raises the first rank's error.
  std::vector<Tensors> run(const Body& body) const {
    std::vector<Tensors> results(coordinates_.size());
    std::vector<std::exception_ptr> errors(coordinates_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < coordinates_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          results[rank] = body(coordinates_[rank], groups_[rank]);
          for (const auto& result : results[rank]) {
            settle(result);
          }
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    for (const auto& error : errors) {
      if (error) {
        std::rethrow_exception(error);
      }
    }
    return results;
  }

  // Collectives that were run, in all groups.
  size_t num_collectives() const {
    size_t count = 0;
    for (const auto& meeting : meetings_) {
      count += meeting->num_meetings();
    }
    return count;
  }

  // Elements that ranks gave to them.
  int64_t num_elements() const {
    int64_t count = 0;
    for (const auto& meeting : meetings_) {
      count += meeting->num_elements();
    }
    return count;
  }

 private:
  static c10::intrusive_ptr<c10d::ProcessGroup> group_of(const GroupRanks& ranks,
                                                         const std::shared_ptr<Meeting>& meeting) {
    const auto rank = static_cast<int>(ranks.own_rank());
    auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, static_cast<int>(ranks.size()));
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::make_intrusive<ThreadBackend>(rank, meeting));
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    return group;
  }

  Mesh mesh_;
  std::vector<Coordinate> coordinates_;
  std::vector<AxisGroups> groups_;
  std::vector<std::shared_ptr<Meeting>> meetings_;
};

}  // namespace funcol::test
