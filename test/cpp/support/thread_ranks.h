// A backend whose ranks are threads of one process: collectives with real values, without sockets.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "support/fake_work.h"

namespace funcol::test {

// A rendezvous of the ranks of a group: each gives tensors, and gets those of all ranks.
class Meeting {
 public:
  using Tensors = std::vector<at::Tensor>;

  explicit Meeting(size_t num_ranks) : given_(num_ranks) {}

  size_t num_ranks() const { return given_.size(); }

  std::vector<Tensors> meet(size_t rank, const Tensors& tensors) {
    std::unique_lock lock(mutex_);
    for (const auto& tensor : tensors) {
      given_[rank].push_back(tensor.clone());
      num_elements_ += tensor.numel();
    }
    const auto round = num_meetings_;
    if (++num_present_ == num_ranks()) {
      num_present_ = 0;
      ++num_meetings_;
      all_ = std::exchange(given_, std::vector<Tensors>(num_ranks()));
      changed_.notify_all();
    } else if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return num_meetings_ > round; })) {
      throw std::runtime_error("a rank did not come to the collective");
    }
    return all_;
  }

  size_t num_meetings() {
    const std::scoped_lock lock(mutex_);
    return num_meetings_;
  }

  // Returns the number of elements that the ranks gave, summed over all rendezvous.
  int64_t num_elements() {
    const std::scoped_lock lock(mutex_);
    return num_elements_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Tensors> given_;
  std::vector<Tensors> all_;
  size_t num_present_ = 0;
  size_t num_meetings_ = 0;
  int64_t num_elements_ = 0;
};

// One rank's side of it. Results are written when the Work is waited for.
class ThreadBackend final : public c10d::Backend {
 public:
  using Tensors = Meeting::Tensors;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  ThreadBackend(int rank, std::shared_ptr<Meeting> meeting)
      : c10d::Backend(rank, static_cast<int>(meeting->num_ranks())), meeting_(std::move(meeting)) {}

  const std::string getBackendName() const override { return "threads"; }  // NOLINT: as PyTorch has it

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto all = meeting_->meet(getRank(), tensors);
    Tensors results;
    for (size_t i = 0; i < tensors.size(); ++i) {
      results.push_back(reduced(all, i, options.reduceOp));
    }
    return fill(tensors, results);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*options*/) override {
    Tensors parts;
    for (const auto& given : meeting_->meet(getRank(), {input})) {
      parts.push_back(given[0].flatten());
    }
    return fill({output}, {at::cat(parts)});
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const auto all = meeting_->meet(getRank(), {input});
    const auto share = output.numel();
    return fill({output}, {reduced(all, 0, options.reduceOp).flatten().narrow(0, getRank() * share, share)});
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& /*output_splits*/,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& /*options*/) override {
    const auto blocks = input_splits.empty() ? input.chunk(getSize()) : input.split_with_sizes(input_splits);
    Tensors received;
    for (const auto& given : meeting_->meet(getRank(), blocks)) {
      received.push_back(given[getRank()]);
    }
    return fill({output}, {at::cat(received)});
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto all = meeting_->meet(getRank(), getRank() == options.rootRank ? tensors : Tensors());
    return fill(tensors, all[options.rootRank]);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const auto all = meeting_->meet(getRank(), inputs.empty() ? Tensors() : inputs[0]);
    return fill(outputs, {all[options.rootRank][getRank()]});
  }

 private:
  static at::Tensor reduced(const std::vector<Tensors>& all, size_t index, const c10d::ReduceOp& op) {
    auto result = all[0][index];
    for (size_t rank = 1; rank < all.size(); ++rank) {
      const auto& next = all[rank][index];
      result = op == c10d::ReduceOp::MAX ? at::maximum(result, next) : result + next;
    }
    return op == c10d::ReduceOp::AVG ? result / static_cast<int64_t>(all.size()) : result;
  }

  static WorkPtr fill(const Tensors& outputs, const Tensors& results) {
    return completed_work([outputs, results] {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < outputs.size(); ++i) {
        outputs[i].detach().copy_(results[i].view(outputs[i].sizes()));
      }
    });
  }

  std::shared_ptr<Meeting> meeting_;
};

}  // namespace funcol::test
